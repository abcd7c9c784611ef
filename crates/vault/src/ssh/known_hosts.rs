//! Lists of known hosts (`known_hosts`): which key a host shows.

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::hmac;

use super::{host_key::is_host_key, wire::SshReader};

/// Longest line.
const LINE_LEN_MAX: usize = 2048;

/// A host and a key of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownHost {
    /// The host as [`host_label`] writes it.
    pub label: String,
    /// The public key.
    pub key: Vec<u8>,
}

/// A host in the spelling of these lists, which name the port only where it is not 22.
pub fn host_label(name: &str, port: u16) -> String {
    if port == 22 { name.to_owned() } else { format!("[{name}]:{port}") }
}

impl KnownHost {
    /// Reads a line about one host whose name is not hashed.
    pub fn parse(line: &str) -> Option<Self> {
        let (names, key) = split(line)?;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._[]:".contains(&byte);
        let label = names.to_ascii_lowercase();
        (!label.is_empty() && label.bytes().all(is_plain)).then_some(Self { label, key })
    }

    /// The line.
    pub fn line(&self) -> String {
        let kind = SshReader::new(&self.key).string().unwrap_or_default();
        format!("{} {} {}", self.label, String::from_utf8_lossy(kind), STANDARD.encode(&self.key))
    }
}

/// The keys of a host in a list. Patterns with `*` and `?`, and authorities, do not count; a revoked key is left out.
pub fn known_hosts_of(list: &str, label: &str) -> Vec<KnownHost> {
    let mut revoked = Vec::new();
    let mut found: Vec<KnownHost> = Vec::new();
    for line in list.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if let Some((_, key)) = line.strip_prefix("@revoked").and_then(|rest| split(rest.trim_start())) {
            revoked.push(key);
        } else if let Some((_, key)) = split(line).filter(|(names, _)| is_about(names, label)) {
            let known = KnownHost { label: label.to_owned(), key };
            if !found.contains(&known) {
                found.push(known);
            }
        }
    }
    found.retain(|known| !revoked.contains(&known.key));
    found
}

/// The names and the key of a line, if its key is one whose signatures can be checked.
fn split(line: &str) -> Option<(&str, Vec<u8>)> {
    if line.len() > LINE_LEN_MAX {
        return None;
    }
    let mut words = line.split_ascii_whitespace();
    let (names, kind, key) = (words.next()?, words.next()?, words.next()?);
    let key = STANDARD.decode(key).ok()?;
    let named = SshReader::new(&key).string().is_some_and(|named| named == kind.as_bytes());
    (named && is_host_key(&key)).then_some((names, key))
}

fn is_about(names: &str, label: &str) -> bool {
    match names.strip_prefix("|1|") {
        Some(hashed) => is_hash_of(hashed, label).unwrap_or(false),
        None => names.split(',').any(|name| name.eq_ignore_ascii_case(label)),
    }
}

/// Whether `SALT|HASH` is the keyed hash of a label.
fn is_hash_of(hashed: &str, label: &str) -> Option<bool> {
    let (salt, hash) = hashed.split_once('|')?;
    let (salt, hash) = (STANDARD.decode(salt).ok()?, STANDARD.decode(hash).ok()?);
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, &salt);
    Some(hmac::verify(&key, label.as_bytes(), &hash).is_ok())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl";
    const OTHER: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAfuCHKVTjquxvt6CM6tdG4SLp1Btn/nOeHHE5UOzRdf";

    #[test]
    fn a_line_names_one_host_and_a_key() {
        let line = format!("[Git.test]:2222 {KEY} a comment");
        let known = KnownHost::parse(&line).unwrap();
        assert_eq!(known.label, host_label("git.test", 2222));
        assert_eq!(known.line(), format!("[git.test]:2222 {KEY}"));
        for bad in [
            "git.test".to_owned(),
            format!("a.test,b.test {KEY}"),
            format!("*.test {KEY}"),
            format!("|1|c2FsdA==|aGFzaA== {KEY}"),
            format!("git.test ecdsa-sha2-nistp256 {}", &KEY[12..]),
            format!("git.test {}", &KEY[..40]),
            format!("git.test'x {KEY}"),
            format!("{} {KEY}", "a".repeat(LINE_LEN_MAX)),
        ] {
            assert_eq!(KnownHost::parse(&bad), None, "{bad}");
        }
    }

    #[test]
    fn keys_of_a_host_are_found_as_ssh_keygen_finds_them() {
        let dir = std::env::temp_dir().join(format!("palisade-known-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("known_hosts");
        let list = format!(
            "# comment\ngit.test,192.0.2.7 {KEY}\n[git.test]:2222 {OTHER}\n@cert-authority git.test {OTHER}\n\
             other.test {OTHER}\n"
        );
        std::fs::write(&file, &list).unwrap();
        let plain = known_hosts_of(&list, "git.test");
        assert_eq!(plain.iter().map(KnownHost::line).collect::<Vec<_>>(), [format!("git.test {KEY}")]);
        let hashes = Command::new("ssh-keygen").args(["-q", "-H", "-f"]).arg(&file).output().unwrap();
        assert!(hashes.status.success(), "{hashes:?}");
        let hashed = std::fs::read_to_string(&file).unwrap();
        assert!(!hashed.contains("other.test"), "{hashed}");
        assert_eq!(known_hosts_of(&hashed, "git.test"), plain);
        assert_eq!(known_hosts_of(&hashed, "[git.test]:2222")[0].line(), format!("[git.test]:2222 {OTHER}"));
        assert!(known_hosts_of(&hashed, "third.test").is_empty());
        assert!(known_hosts_of(&format!("{list}@revoked * {KEY}\n"), "git.test").is_empty());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
