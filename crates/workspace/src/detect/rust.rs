//! Finds a Rust toolchain in the user's home directory.

use std::path::Path;

/// The sysroot of the user's Rust toolchain; none if a system-wide cargo exists.
pub fn rust_of(person: &crate::GitIdentity, dir: &Path) -> Option<std::path::PathBuf> {
    if ["/usr/bin/cargo", "/usr/local/bin/cargo"].iter().any(|path| Path::new(path).exists()) {
        return None;
    }
    let mut command = std::process::Command::new("rustc");
    command
        .env_clear()
        .env("HOME", &person.home)
        .env("PATH", &person.path)
        .env("RUSTUP_AUTO_INSTALL", "0")
        .current_dir(dir);
    command.envs(
        person
            .env
            .iter()
            .filter(|(name, _)| name == "RUSTUP_HOME" || name == "CARGO_HOME" || name == "RUSTUP_TOOLCHAIN")
            .map(|(name, value)| (name, value)),
    );
    let output = command.args(["--print", "sysroot"]).stdin(std::process::Stdio::null()).output().ok()?;
    let root = std::path::PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    (output.status.success() && root.join("bin/cargo").exists()).then_some(root)
}
