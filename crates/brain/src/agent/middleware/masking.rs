//! Secret masking: a secret that a tool printed never reaches the model or the log.

use super::Middleware;
use crate::{
    agent::{call::CallResult, journal::BoxFuture, tool::CallContext},
    model::ResultBlock,
};

/// The shortest secret that is looked for; shorter ones would match by chance.
const SECRET_LEN_MIN: usize = 8;
const MASK: &str = "[secret]";

/// Replaces secrets in results.
pub struct SecretMask {
    /// The longest first, so that a secret that contains another is replaced whole.
    secrets: Vec<String>,
}

impl SecretMask {
    /// Looks for these secrets.
    pub fn new(secrets: impl IntoIterator<Item = String>) -> Self {
        let mut secrets: Vec<String> =
            secrets.into_iter().filter(|secret| secret.len() >= SECRET_LEN_MIN).collect();
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self { secrets }
    }

    /// The text without the secrets.
    pub fn mask(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, MASK))
    }
}

impl Middleware for SecretMask {
    fn name(&self) -> &'static str {
        "masking"
    }

    fn refine<'a>(&'a self, context: &'a CallContext, mut result: CallResult) -> BoxFuture<'a, CallResult> {
        let _ = context;
        for block in &mut result.blocks {
            if let ResultBlock::Text { text } = block {
                *text = self.mask(text);
            }
        }
        Box::pin(async { result })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_replaced_whole_and_short_texts_are_not_secrets() {
        let mask = SecretMask::new(["sk-12345".into(), "sk-12345-longer".into(), "abc".into()]);
        assert_eq!(mask.mask("a sk-12345-longer b sk-12345 abc"), "a [secret] b [secret] abc");
    }
}
