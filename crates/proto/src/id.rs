//! Ids as newtypes, and the one place that checks their spelling.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::base32;

/// How many random bytes an id has; each becomes one character.
pub const ID_LEN: usize = 12;
const ID_LEN_MAX: usize = 32;

/// The text is not a valid id.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not an id: ids are 1 to {ID_LEN_MAX} of a-z and 0-9")]
pub struct IdError(String);

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Makes an id from random bytes of the caller.
            pub fn from_random(bytes: [u8; ID_LEN]) -> Self {
                Self(base32::encode(&bytes))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::try_from(text.to_owned())
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
                if (1..=ID_LEN_MAX).contains(&text.len()) && text.bytes().all(known) {
                    Ok(Self(text))
                } else {
                    Err(IdError(text))
                }
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

id! {
    /// The id of a Body. It never holds a `-`, so that `<port>-<id>.<domain>` splits in one way only.
    BodyId
}
id! {
    /// The id of an agent: one Brain at work.
    AgentId
}
id! {
    /// The id of a node: one machine's `pal`, or in a cluster one `pal serve`.
    NodeId
}
id! {
    /// The id of a snapshot.
    SnapshotId
}
id! {
    /// The id of a template.
    TemplateId
}
id! {
    /// The id of a layer.
    LayerId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_hold_only_lower_case_letters_and_digits() {
        for bad in ["", "A", "a-b", "../x", "a b", "é", "a\0b", &"x".repeat(33)] {
            assert!(bad.parse::<BodyId>().is_err(), "{bad:?}");
        }
        assert_eq!("ab12".parse::<BodyId>().unwrap().as_str(), "ab12");
        assert!(BodyId::from_random([255; ID_LEN]).as_str().parse::<BodyId>().is_ok());
    }
}
