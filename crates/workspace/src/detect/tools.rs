//! The tools that manifests belong to, how to find out their versions, and how to install a missing one.

/// A program that a prepare step needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tool {
    /// The language, in one word.
    pub language: &'static str,
    /// The program to look for on `PATH`.
    pub program: &'static str,
    /// A shell line that prints the version; it fails if the tool, or a part that the steps need, is missing.
    pub probe: &'static str,
    /// How to install it on the host.
    pub get: &'static str,
}

pub const CARGO: Tool = Tool {
    language: "rust",
    program: "cargo",
    probe: "command -v cargo >/dev/null && rustc --version",
    get: "install Rust: https://rustup.rs, or apt-get install cargo",
};
pub const NODE: Tool = Tool {
    language: "node",
    program: "npm",
    probe: "command -v npm >/dev/null && node --version",
    get: "apt-get install nodejs npm",
};
pub const PYTHON: Tool = Tool {
    language: "python",
    program: "python3",
    // Debian keeps ensurepip, which makes virtual environments, in a package of its own. The Python of a virtual
    // environment tells nothing about the one that makes the next.
    probe: "PATH=${PATH#/home/user/.venv/bin:}; python3 -c 'import ensurepip, venv' 2>/dev/null && python3 --version",
    get: "apt-get install python3-venv",
};
pub const GO: Tool = Tool {
    language: "go",
    program: "go",
    // Without this setting, a newer Go would download the version that a go.mod above names.
    probe: "GOTOOLCHAIN=local go version",
    get: "apt-get install golang-go",
};
pub const RUBY: Tool = Tool {
    language: "ruby",
    program: "bundle",
    probe: "command -v bundle >/dev/null && ruby --version",
    get: "apt-get install bundler",
};
pub const PHP: Tool = Tool {
    language: "php",
    program: "composer",
    probe: "command -v composer >/dev/null && php --version",
    get: "apt-get install composer",
};
pub const ELIXIR: Tool = Tool {
    language: "elixir",
    program: "mix",
    probe: "mix --version | grep '^Mix'",
    get: "apt-get install elixir",
};
pub const MAVEN: Tool = Tool {
    language: "java",
    program: "mvn",
    probe: "mvn --version | grep -o 'Apache Maven [0-9.]*'",
    get: "apt-get install maven",
};
pub const GRADLE: Tool = Tool {
    language: "java",
    program: "gradle",
    probe: "gradle --version | grep '^Gradle'",
    get: "apt-get install gradle",
};
