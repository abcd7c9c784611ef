//! Paths that a model writes, by the rules and in the words of Deep Agents.
//!
//! Invariant: a normalised path begins with `/`, and has no `.`, no `..`, no empty part and no slash at its end.

/// The longest path in bytes, as of the kernel.
const PATH_LEN_MAX: usize = 4096;

/// The normalised form of a path. A relative path counts from `/`, as in Deep Agents. An error is a text for the model.
pub fn normalize(path: &str) -> Result<String, String> {
    let slashed = path.replace('\\', "/");
    if path.starts_with('~') || slashed.split('/').any(|part| part == "..") {
        return Err(format!("Path traversal not allowed: {}", shown(path)));
    }
    let mut letters = path.chars();
    if letters.next().is_some_and(|letter| letter.is_ascii_alphabetic()) && letters.next() == Some(':') {
        return Err(format!(
            "Windows absolute paths are not supported: {}. Please use virtual paths starting with / (e.g., /workspace/file.txt)",
            shown(path)
        ));
    }
    if path.contains('\0') || path.len() > PATH_LEN_MAX {
        return Err(format!("Invalid path: {}", shown(path)));
    }
    let parts: Vec<&str> = slashed.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    Ok(format!("/{}", parts.join("/")))
}

/// The normalised form of a path that counts from a directory unless it begins with `/`, as in a shell. It may go up
/// with `..`, which ends at `/`.
pub fn resolve(directory: &str, path: &str) -> Result<String, String> {
    if path.contains('\0') || path.len() > PATH_LEN_MAX || path.is_empty() {
        return Err(format!("Invalid path: {}", shown(path)));
    }
    let whole = if path.starts_with('/') { path.to_owned() } else { format!("{directory}/{path}") };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    Ok(format!("/{}", parts.join("/")))
}

/// A path in an error: control characters would change the screen of a person who reads it.
fn shown(path: &str) -> String {
    path.chars().take(300).filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_normalised_as_deep_agents_does() {
        let cases = [
            ("/a/b", "/a/b"),
            ("/./a//b/", "/a/b"),
            ("foo/bar", "/foo/bar"),
            ("/", "/"),
            ("", "/"),
            (".", "/"),
            ("/foo..bar.txt", "/foo..bar.txt"),
            ("/a b/é", "/a b/é"),
            ("a\\b", "/a/b"),
        ];
        for (path, expected) in cases {
            assert_eq!(normalize(path).as_deref(), Ok(expected), "{path:?}");
        }
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused_in_deep_agents_words() {
        assert_eq!(normalize("../x").unwrap_err(), "Path traversal not allowed: ../x");
        assert_eq!(normalize("/a/../b").unwrap_err(), "Path traversal not allowed: /a/../b");
        assert_eq!(normalize("a\\..\\b").unwrap_err(), "Path traversal not allowed: a\\..\\b");
        assert_eq!(normalize("~/x").unwrap_err(), "Path traversal not allowed: ~/x");
        assert_eq!(
            normalize("C:/x").unwrap_err(),
            "Windows absolute paths are not supported: C:/x. Please use virtual paths starting with / (e.g., /workspace/file.txt)"
        );
        assert_eq!(normalize("/a\0b").unwrap_err(), "Invalid path: /ab");
        assert!(normalize(&format!("/{}", "a".repeat(PATH_LEN_MAX))).is_err());
    }

    #[test]
    fn a_path_of_a_shell_counts_from_its_directory() {
        assert_eq!(resolve("/work/app", "src/a.py").as_deref(), Ok("/work/app/src/a.py"));
        assert_eq!(resolve("/work/app", "/etc/x").as_deref(), Ok("/etc/x"));
        assert_eq!(resolve("/work/app", "../lib/./x").as_deref(), Ok("/work/lib/x"));
        assert_eq!(resolve("/", "../../x").as_deref(), Ok("/x"));
        assert!(resolve("/", "").is_err() && resolve("/", "a\0").is_err());
    }
}
