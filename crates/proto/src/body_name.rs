//! Names that users give to Bodies, and the one place that checks their spelling.
//!
//! Invariant: every id of a Body is spelt like a name, so one text is looked up as either.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Longest name: that of a label in a host name.
const NAME_LEN_MAX: usize = 63;

/// The text is not a valid name of a Body.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} cannot name a Body: a name is 1 to {NAME_LEN_MAX} of a-z, 0-9 and `-`, and neither begins nor ends with `-`"
)]
pub struct BodyNameError(String);

/// The name of a Body, unique among the Bodies of a data directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BodyName(String);

impl BodyName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The names of `count` Bodies that are created together: the name itself for one, else `NAME-1`, `NAME-2`, …
    pub fn number(&self, count: u32) -> Result<Vec<Self>, BodyNameError> {
        match count {
            1 => Ok(vec![self.clone()]),
            count => (1..=count).map(|number| format!("{self}-{number}").parse()).collect(),
        }
    }
}

impl fmt::Display for BodyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for BodyName {
    type Err = BodyNameError;
    fn from_str(text: &str) -> Result<Self, BodyNameError> {
        Self::try_from(text.to_owned())
    }
}

impl TryFrom<String> for BodyName {
    type Error = BodyNameError;
    fn try_from(text: String) -> Result<Self, BodyNameError> {
        let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let dashed = text.starts_with('-') || text.ends_with('-');
        if (1..=NAME_LEN_MAX).contains(&text.len()) && text.bytes().all(known) && !dashed {
            Ok(Self(text))
        } else {
            Err(BodyNameError(text))
        }
    }
}

impl From<BodyName> for String {
    fn from(name: BodyName) -> String {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_labels_of_host_names() {
        for bad in ["", "-", "-a", "a-", "A", "a_b", "a.b", "a/b", "a:b", "é", "a b", &"x".repeat(64)] {
            assert!(bad.parse::<BodyName>().is_err(), "{bad:?}");
        }
        for good in ["a", "0", "fix-login", "a--b", &"x".repeat(63)] {
            assert_eq!(good.parse::<BodyName>().unwrap().as_str(), good);
        }
        let id = crate::BodyId::from_random([7; crate::id::ID_LEN]);
        assert!(id.as_str().parse::<BodyName>().is_ok(), "an id is looked up like a name");
    }

    #[test]
    fn several_bodies_get_numbers() {
        let name: BodyName = "web".parse().unwrap();
        let texts = |count| name.number(count).unwrap().into_iter().map(String::from).collect::<Vec<_>>();
        assert_eq!(texts(1), ["web"]);
        assert_eq!(texts(3), ["web-1", "web-2", "web-3"]);
        assert!("x".repeat(62).parse::<BodyName>().unwrap().number(2).is_err());
    }
}
