//! The tools that lockfiles belong to, and how to install one that is missing.

/// A program that a prepare step needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tool {
    /// The language, in one word.
    pub language: &'static str,
    /// The program to look for on `PATH`.
    pub program: &'static str,
    /// How to install it on the host.
    pub get: &'static str,
}

pub const CARGO: Tool = Tool {
    language: "cargo",
    program: "cargo",
    get: "install Rust: https://rustup.rs, or apt-get install cargo",
};
pub const NODE: Tool = Tool { language: "node", program: "npm", get: "apt-get install nodejs npm" };
pub const PYTHON: Tool = Tool { language: "python", program: "python3", get: "apt-get install python3-venv" };
pub const GO: Tool = Tool { language: "go", program: "go", get: "apt-get install golang-go" };
pub const RUBY: Tool = Tool { language: "ruby", program: "bundle", get: "apt-get install bundler" };
pub const PHP: Tool = Tool { language: "php", program: "composer", get: "apt-get install composer" };
pub const ELIXIR: Tool = Tool { language: "elixir", program: "mix", get: "apt-get install elixir" };
