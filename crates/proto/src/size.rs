//! A number of bytes, with the units that people write.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Size(pub u64);

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Size {
    /// A number of mebibytes.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// A number of gibibytes.
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) if self.0.is_multiple_of(*unit) => write!(f, "{}{name}", self.0 / unit),
            Some((name, unit)) => {
                let tenths = u128::from(self.0) * 10 / u128::from(*unit);
                write!(f, "{}.{}{name}", tenths / 10, tenths % 10)
            }
            None => write!(f, "{}B", self.0),
        }
    }
}

/// The text is not a size.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a size: write a positive whole number with B, KiB, MiB, GiB or TiB, such as 512MiB")]
pub struct SizeError(String);

impl FromStr for Size {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError(text.to_owned());
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| error())?;
        let scale = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1 << 10,
            "m" | "mb" | "mib" => 1 << 20,
            "g" | "gb" | "gib" => 1 << 30,
            "t" | "tb" | "tib" => 1u64 << 40,
            _ => return Err(error()),
        };
        number.checked_mul(scale).map(Size).ok_or_else(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("1", 1), ("1B", 1), ("2k", 2048), ("512MiB", 512 << 20), ("1 GiB", 1 << 30)] {
            assert_eq!(text.parse::<Size>().unwrap(), Size(bytes), "{text}");
        }
        for bad in ["", "-1", "1.5G", "GiB", "99999999999999999999", "18446744073709551615KiB", "1x"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_fits() {
        for (bytes, text) in
            [(0, "0B"), (512, "512B"), (1 << 20, "1MiB"), (1536, "1.5KiB"), (3 << 30, "3GiB")]
        {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
