//! The budgets of a rule: how many connections or requests in a time, and how many bytes.

use std::time::Duration;

use sha2::{Digest, Sha256};

use super::EgressRule;
use crate::event::hex;

/// Most connections or requests of a rate.
const RATE_MAX: u32 = 10_000;
/// Most digits of a number of bytes.
const BYTES_DIGITS_MAX: usize = 7;

/// The budgets of a rule, ready to be spent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleBudget {
    /// The text that tells the targets of rules apart: what was spent belongs to the targets, so a change of the policy
    /// that keeps them, or of the budget itself, gives nothing back.
    pub key: String,
    /// The rule, for the record.
    pub rule: String,
    /// How many connections or requests in any period.
    pub rate: Option<RequestRate>,
    /// How many bytes.
    pub bytes: Option<ByteBudget>,
}

/// A number of connections or requests in any period of a length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRate {
    /// How many.
    pub count: u32,
    /// The length of the period.
    pub period: Duration,
    /// The rate as it was written.
    pub text: String,
}

/// A number of bytes as long as the Body lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteBudget {
    /// How many.
    pub bytes: u64,
    /// The number as it was written.
    pub text: String,
}

impl RuleBudget {
    /// Reads the limit of a rule; none if the rule has none. The error says what is wrong.
    pub fn of(rule: &EgressRule) -> Result<Option<Self>, &'static str> {
        let Some(limit) = &rule.limit else { return Ok(None) };
        let rate = limit.rate.as_deref().map(RequestRate::parse);
        let bytes = limit.bytes.as_deref().map(ByteBudget::parse);
        match (rate, bytes) {
            (None, None) => Err("its `limit` needs `rate` or `bytes`"),
            (Some(None), _) => {
                Err("the `rate` of its limit is a number up to 10000 for each s, min or h, such as `60/min`")
            }
            (_, Some(None)) => {
                Err("the `bytes` of its limit are a number with KiB, MiB or GiB, such as `100MiB`")
            }
            (rate, bytes) => Ok(Some(Self {
                key: key(rule),
                rule: rule.shown(),
                rate: rate.flatten(),
                bytes: bytes.flatten(),
            })),
        }
    }
}

/// A hash of the targets of a rule.
fn key(rule: &EgressRule) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    };
    add(&rule.to);
    for (mark, pairs) in [("?", &rule.query), ("#", &rule.headers)] {
        for (name, value) in pairs {
            [mark, name, value].into_iter().for_each(&mut add);
        }
    }
    hex(&hash.finalize()[..16])
}

impl RequestRate {
    fn parse(text: &str) -> Option<Self> {
        let (count, unit) = text.split_once('/')?;
        let count = count.parse().ok().filter(|count| is_number(text) && (1..=RATE_MAX).contains(count))?;
        let period = Duration::from_secs(match unit {
            "s" => 1,
            "min" => 60,
            "h" => 3600,
            _ => return None,
        });
        Some(Self { count, period, text: text.to_owned() })
    }
}

impl ByteBudget {
    fn parse(text: &str) -> Option<Self> {
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
        let unit = match unit {
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            _ => return None,
        };
        let number: u64 =
            number.parse().ok().filter(|_| is_number(number) && number.len() <= BYTES_DIGITS_MAX)?;
        Some(Self { bytes: number * unit, text: text.to_owned() })
    }
}

/// Whether a text begins with a digit other than zero.
fn is_number(text: &str) -> bool {
    text.bytes().next().is_some_and(|byte| (b'1'..=b'9').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::RuleLimit;

    fn limited(to: &str, rate: Option<&str>, bytes: Option<&str>) -> EgressRule {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        EgressRule {
            limit: Some(RuleLimit { rate: owned(rate), bytes: owned(bytes) }),
            ..EgressRule::allow(to)
        }
    }

    #[test]
    fn budgets_have_numbers_and_units() {
        let budget = RuleBudget::of(&limited("a.test", Some("60/min"), Some("100MiB"))).unwrap().unwrap();
        let (rate, bytes) = (budget.rate.unwrap(), budget.bytes.unwrap());
        assert_eq!((rate.count, rate.period.as_secs(), bytes.bytes), (60, 60, 100 << 20));
        assert_eq!(RuleBudget::of(&EgressRule::allow("a.test")), Ok(None));
        for rate in ["", "60", "0/s", "60/m", "060/s", "+6/s", "10001/h", "6 /s", "6/s/s"] {
            assert!(RuleBudget::of(&limited("a.test", Some(rate), None)).is_err(), "{rate:?}");
        }
        for bytes in ["", "100", "0MiB", "01MiB", "100MB", "1.5GiB", "-1KiB", "10000000KiB", "1 KiB", "KiB"] {
            assert!(RuleBudget::of(&limited("a.test", None, Some(bytes))).is_err(), "{bytes:?}");
        }
        assert!(RuleBudget::of(&limited("a.test", None, None)).is_err());
    }

    #[test]
    fn what_was_spent_belongs_to_the_targets() {
        let key = |rule: &EgressRule| RuleBudget::of(rule).unwrap().unwrap().key;
        let one = limited("a.test", None, Some("1MiB"));
        assert_eq!(key(&one), key(&limited("a.test", Some("1/s"), Some("2MiB")).because("more")));
        assert_ne!(key(&one), key(&limited("b.test", None, Some("1MiB"))));
        let pair = |name: &str, value: &str| [(name.to_owned(), value.to_owned())].into();
        let query = EgressRule { query: pair("a", "b"), ..one.clone() };
        let headers = EgressRule { headers: pair("a", "b"), ..one.clone() };
        let other = EgressRule { query: pair("ab", ""), ..one.clone() };
        let keys = [key(&one), key(&query), key(&headers), key(&other)];
        assert!((0..4).all(|at| !keys[at + 1..].contains(&keys[at])), "{keys:?}");
        assert_eq!(keys[0].len(), 32);
    }
}
