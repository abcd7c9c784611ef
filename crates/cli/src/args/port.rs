//! The options of `pal port`.

use std::str::FromStr;

use clap::Subcommand;

/// Reach ports inside Bodies from this machine.
///
/// Example: pal port forward web 8000
#[derive(Debug, clap::Args)]
pub struct PortArgs {
    /// The command.
    #[command(subcommand)]
    pub command: PortCommand,
}

/// The commands of `pal port`.
#[derive(Debug, Subcommand)]
pub enum PortCommand {
    /// Listen on the loopback of this machine, and carry each connection to a port inside a Body, until Ctrl-C.
    ///
    /// Example: pal port forward web 8000 5432:15432
    Forward(PortForwardArgs),
}

/// Which ports are forwarded.
#[derive(Debug, clap::Args)]
pub struct PortForwardArgs {
    /// The Body: its id, the beginning of it, or its name
    #[arg(value_name = "BODY")]
    pub body: String,
    /// A port inside the Body, and the port of this machine: the same one if left out, any free one if 0
    #[arg(value_name = "PORT[:LOCAL]", required = true)]
    pub ports: Vec<PortPair>,
}

/// A port inside a Body, and one of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortPair {
    /// The port inside.
    pub inside: u16,
    /// The port of this machine; 0 for any.
    pub local: u16,
}

impl FromStr for PortPair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number =
            |text: &str| text.parse::<u16>().map_err(|_| format!("{text:?} is not a port from 0 to 65535"));
        let (inside, local) = text.split_once(':').unwrap_or((text, text));
        let pair = Self { inside: number(inside)?, local: number(local)? };
        if pair.inside == 0 { Err("a port inside a Body is 1 to 65535".into()) } else { Ok(pair) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_has_one_port_or_two() {
        let pair = |text: &str| text.parse::<PortPair>().map(|pair| (pair.inside, pair.local));
        assert_eq!(
            (pair("8000"), pair("80:0"), pair("80:8080")),
            (Ok((8000, 8000)), Ok((80, 0)), Ok((80, 8080)))
        );
        for bad in ["", "0", "x", "80:", ":80", "70000", "1:2:3", "+80x"] {
            assert!(pair(bad).is_err(), "{bad}");
        }
    }
}
