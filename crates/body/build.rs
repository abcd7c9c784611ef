//! Builds `pal-launch`, the static program that is launcher, supervisor and guest of every Body, and embeds
//! it in the library.
//!
//! It has a profile and a target directory of its own: a release optimizes it for size across crates (`guest`), a
//! development build compiles it quickly (`guest-dev`).

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
    process::Command,
};

const PACKAGE: &str = "launch";
const PROGRAM: &str = "pal-launch";
/// Uses the compact implementation of SHA-2 where the CPU has no instructions for it: an emulated microVM
/// pays for each instruction that it runs for the first time, and hashes little.
const COMPACT: &str = r#"target.'cfg(unix)'.rustflags=['--cfg','sha2_backend_soft="compact"']"#;

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..").canonicalize()?;
    for room in ["egress", "guest", "launch", "proto", "sys", "vault"] {
        println!("cargo:rerun-if-changed={}", root.join("crates").join(room).join("src").display());
        println!("cargo:rerun-if-changed={}", root.join("crates").join(room).join("Cargo.toml").display());
    }
    println!("cargo:rerun-if-changed={}", root.join("crates/proto/proto").display());
    println!("cargo:rerun-if-changed={}", root.join("Cargo.lock").display());
    let target = env::var("TARGET")?;
    let profile = if env::var("PROFILE")? == "release" { "guest" } else { "guest-dev" };
    let out = target_dir()?.join("guest-programs");
    let mut cargo = Command::new(env::var("CARGO")?);
    cargo
        .current_dir(&root)
        .args(["build", "--quiet", "--profile", profile, "--config", COMPACT])
        .args(["--target", &target, "--target-dir"])
        .arg(&out);
    if root.join("Cargo.lock").exists() {
        cargo.arg("--locked");
    }
    cargo.args(["--package", PACKAGE]);
    // Cargo's variables describe this crate, and would mislead the build of the program.
    for (name, _) in env::vars()
        .filter(|(name, _)| name.starts_with("CARGO_") && name != "CARGO_HOME" || name == "RUSTFLAGS")
    {
        cargo.env_remove(name);
    }
    if !cargo.status()?.success() {
        return Err("cannot build pal-launch".into());
    }
    let path = out.join(&target).join(profile).join(PROGRAM);
    println!("cargo:rustc-env=PAL_LAUNCH={}", path.display());
    println!("cargo:rustc-env=PAL_LAUNCH_NAME={PROGRAM}-{:016x}", hash(&std::fs::read(&path)?));
    Ok(())
}

/// FNV-1a: the name changes with the contents. It is no protection: only the user can write to the directory.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The target directory of this build: four levels above `OUT_DIR`.
fn target_dir() -> Result<PathBuf, Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    Ok(out.ancestors().nth(4).map(Path::to_owned).ok_or("OUT_DIR is not in a target directory")?)
}
