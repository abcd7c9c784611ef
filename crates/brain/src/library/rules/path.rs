//! Paths in rules: globs over the files that a call names.

use globset::{GlobBuilder, GlobMatcher};

/// A glob over paths. It also stands for everything below a directory that it matches.
#[derive(Debug, Clone)]
pub(super) struct PathPattern {
    glob: GlobMatcher,
    shown: String,
}

impl PathPattern {
    /// Reads a glob; an error is a text. Without a slash at its beginning it matches at any depth.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let trimmed = text.trim_end_matches('/');
        if trimmed.is_empty() {
            return Err("the path is empty".to_owned());
        }
        let anchored = if trimmed.starts_with('/') { trimmed.to_owned() } else { format!("**/{trimmed}") };
        let glob = GlobBuilder::new(&anchored).literal_separator(true).backslash_escape(true).build();
        let glob = glob.map_err(|error| format!("{text:?} is no glob: {}", error.kind()))?;
        Ok(Self { glob: glob.compile_matcher(), shown: text.to_owned() })
    }

    /// A glob that matches only this path, as it is written in a file.
    pub(super) fn escape(path: &str) -> String {
        globset::escape(path)
    }

    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// Whether a path, or a directory above it, matches.
    pub(super) fn matches(&self, path: &str) -> bool {
        let ends = path.char_indices().filter(|(index, letter)| *letter == '/' && *index > 0);
        let mut parents = ends.map(|(index, _)| &path[..index]);
        self.glob.is_match(path) || parents.any(|parent| self.glob.is_match(parent))
    }
}

/// The absolute path of a file, without `.` and `..`, for a path that is relative to a directory.
pub fn normalize_path(directory: &str, path: &str) -> String {
    let whole = if path.starts_with('/') { path.to_owned() } else { format!("{directory}/{path}") };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match_at_their_depth_and_below() {
        let check = |pattern: &str, yes: &[&str], no: &[&str]| {
            let pattern = PathPattern::parse(pattern).unwrap();
            assert!(yes.iter().all(|path| pattern.matches(path)), "{pattern:?} {yes:?}");
            assert!(!no.iter().any(|path| pattern.matches(path)), "{pattern:?} {no:?}");
        };
        check(".env", &["/.env", "/a/b/.env"], &["/a/x.env", "/env"]);
        check("/w/.git", &["/w/.git", "/w/.git/config"], &["/w/.gitignore", "/x/w/.git"]);
        check("migrations/*.sql", &["/a/migrations/1.sql"], &["/a/migrations/x/1.sql"]);
        check("/a/**/b", &["/a/b", "/a/x/y/b", "/a/b/c"], &["/b"]);
        assert!(PathPattern::parse("[").is_err() && PathPattern::parse("//").is_err());
        let odd = "/a/[x]*{b}.txt";
        check(&PathPattern::escape(odd), &[odd], &["/a/xyb.txt"]);
    }

    #[test]
    fn a_path_cannot_hide_behind_dots() {
        assert_eq!(normalize_path("/w", "a/../.env"), "/w/.env");
        assert_eq!(normalize_path("/w", "/etc//./x/.."), "/etc");
        assert_eq!(normalize_path("/w", "../../../x"), "/x");
    }
}
