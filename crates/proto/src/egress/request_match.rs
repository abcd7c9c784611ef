//! Conditions of a rule on HTTP requests: methods, paths, parameters of the query, and headers.
//!
//! Trust: servers decode, fold and merge the parts of a path in ways of their own, so a rule with conditions takes only
//! paths that have one reading.

use super::request_conditions::{ConditionFit, ValueConditions};

/// Most methods of a rule, and its longest path.
const METHODS_MAX: usize = 16;
const PATH_LEN_MAX: usize = 1024;

/// The parts of a request that rules judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestTarget<'a> {
    /// The method, in its own spelling.
    pub method: &'a str,
    /// The path, which begins with a slash.
    pub path: &'a str,
    /// The query, as the program wrote it.
    pub query: Option<&'a str>,
    /// The headers: names and values.
    pub headers: &'a [(&'a str, &'a [u8])],
}

/// The requests to which a rule is limited; without conditions: all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestPattern {
    methods: Vec<String>,
    path: Option<String>,
    query: ValueConditions,
    headers: ValueConditions,
}

impl RequestPattern {
    /// Reads a list of methods such as `GET,HEAD`, and a pattern of paths such as `/repos/**`.
    pub fn parse(methods: Option<&str>, path: Option<&str>) -> Option<Self> {
        let methods: Vec<String> =
            methods.map_or(Vec::new(), |text| text.split(',').map(str::to_owned).collect());
        let is_method = |method: &String| {
            !method.is_empty() && method.len() <= 32 && method.bytes().all(|byte| byte.is_ascii_uppercase())
        };
        if methods.len() > METHODS_MAX || !methods.iter().all(is_method) {
            return None;
        }
        let is_path = |path: &str| {
            let target = RequestTarget::new("GET", path);
            path.len() <= PATH_LEN_MAX && target.check_one_reading().is_ok()
        };
        if path.is_some_and(|path| !is_path(path)) {
            return None;
        }
        // The path of a whole host is no condition.
        let path = path.filter(|path| *path != "/**").map(str::to_owned);
        Some(Self { methods, path, ..Self::default() })
    }

    /// The pattern with conditions on the query and on headers.
    #[must_use]
    pub fn with_values(self, query: ValueConditions, headers: ValueConditions) -> Self {
        Self { query, headers, ..self }
    }

    /// Whether there are requests that the rule does not cover.
    pub fn is_limited(&self) -> bool {
        !self.methods.is_empty() || self.path.is_some() || self.has_values()
    }

    /// Whether there are conditions on the query or on headers.
    pub fn has_values(&self) -> bool {
        !self.query.is_empty() || !self.headers.is_empty()
    }

    /// Whether the rule covers a request.
    pub fn fit(&self, request: &RequestTarget<'_>) -> ConditionFit {
        self.fit_line(request).min(self.headers.fit_headers(request.headers))
    }

    /// Whether the rule covers a request as far as its first line says.
    pub fn fit_line(&self, request: &RequestTarget<'_>) -> ConditionFit {
        let method = self.methods.is_empty() || self.methods.iter().any(|method| method == request.method);
        let is_path = |pattern: &String| fits(pattern.as_bytes(), request.path.as_bytes());
        match method && self.path.as_ref().is_none_or(is_path) {
            true => self.query.fit_query(request.query),
            false => ConditionFit::No,
        }
    }
}

impl<'a> RequestTarget<'a> {
    /// A request without a query and without headers.
    pub fn new(method: &'a str, path: &'a str) -> Self {
        Self { method, path, query: None, headers: &[] }
    }

    /// Checks that every server reads the path in one way.
    pub fn check_one_reading(&self) -> Result<(), &'static str> {
        let path = self.path;
        if !path.starts_with('/') {
            return Err("has no path");
        }
        if path.contains("//") || path.split('/').any(|part| part == "." || part == "..") {
            return Err("has a path with empty or dot segments");
        }
        if path.bytes().any(|byte| !byte.is_ascii_graphic() || b"\\;#?".contains(&byte)) {
            return Err("has a path with characters that servers read differently");
        }
        // Encoded forms of what a server may decode before it splits the path: `/`, `\\`, `.`, `;`, `%` and controls.
        let encoded = |at: usize| path.get(at + 1..at + 3).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let is_read_differently = |(at, _): (usize, &str)| {
            encoded(at).is_none_or(|byte| byte < 0x20 || byte == 0x7f || b"/\\.;%#?".contains(&byte))
        };
        if path.match_indices('%').any(is_read_differently) {
            return Err("has a path with encoded characters that servers read differently");
        }
        Ok(())
    }
}

/// Whether a path fits a pattern. Time is at most the product of their lengths.
fn fits(pattern: &[u8], path: &[u8]) -> bool {
    // The positions in the path at which the rest of the pattern may begin.
    let mut reached = vec![false; path.len() + 1];
    reached[0] = true;
    let mut at = 0;
    while at < pattern.len() {
        let (is_any, is_part) = (pattern[at..].starts_with(b"**"), pattern[at] == b'*');
        let mut next = vec![false; path.len() + 1];
        for position in 0..=path.len() {
            let before = position > 0 && next[position - 1];
            next[position] = if is_any {
                reached[position] || before
            } else if is_part {
                reached[position] || (before && path[position - 1] != b'/')
            } else {
                position > 0 && reached[position - 1] && path[position - 1] == pattern[at]
            };
        }
        reached = next;
        at += if is_any { 2 } else { 1 };
    }
    reached[path.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(methods: Option<&str>, path: Option<&str>, request: &str) -> bool {
        let (method, path_asked) = request.split_once(' ').unwrap();
        let target = RequestTarget::new(method, path_asked);
        RequestPattern::parse(methods, path).unwrap().fit(&target) == ConditionFit::Yes
    }

    #[test]
    fn methods_and_paths_limit_a_rule() {
        assert!(covers(None, None, "DELETE /anything"));
        assert!(covers(Some("GET,HEAD"), None, "HEAD /a") && !covers(Some("GET,HEAD"), None, "POST /a"));
        assert!(!covers(Some("GET"), None, "get /a"), "a method has one spelling");
        let repo = Some("/repos/*/app/**");
        for (request, is_covered) in [
            ("GET /repos/me/app/issues/1", true),
            ("GET /repos/me/app/", true),
            ("GET /repos/me/app", false),
            ("GET /repos/me/x/app/issues", false),
            ("GET /repos/me/apps/issues", false),
            ("GET /x/repos/me/app/issues", false),
        ] {
            assert_eq!(covers(None, repo, request), is_covered, "{request}");
        }
        assert!(covers(None, Some("/v*/chat"), "POST /v1/chat"));
        assert!(!RequestPattern::parse(None, Some("/**")).unwrap().is_limited());
    }

    #[test]
    fn a_pattern_of_many_stars_takes_little_time() {
        let pattern = format!("/{}", "*a".repeat(500));
        assert!(!covers(None, Some(&pattern), &format!("GET /{}b", "a".repeat(8000))));
    }

    #[test]
    fn conditions_that_mean_nothing_are_refused() {
        for (methods, path) in [
            (Some(""), None),
            (Some("get"), None),
            (Some("GET,"), None),
            (None, Some("/a//b")),
            (None, Some("/a/../b")),
            (None, Some("/a?b=c")),
            (None, Some("/a b")),
            (None, Some("/a%2fb")),
        ] {
            assert_eq!(RequestPattern::parse(methods, path), None, "{methods:?} {path:?}");
        }
    }

    #[test]
    fn a_path_has_one_reading() {
        let check = |path: &str| RequestTarget::new("GET", path).check_one_reading();
        for path in ["/", "/a/b.c", "/a%20b", "/a/.git/x", "/@scope/name", "/a..b/c", "/%C3%A9"] {
            assert_eq!(check(path), Ok(()), "{path}");
        }
        for path in [
            "",
            "a",
            "*",
            "/a/../b",
            "/a/.",
            "/..",
            "//a",
            "/a//",
            "/a\\b",
            "/a;x=1/b",
            "/%2e%2e/b",
            "/a%2Fb",
            "/a%5cb",
            "/a%00",
            "/a%0d%0aX",
            "/a%",
            "/a%4",
            "/a%zz",
            "/a%252f",
            "/\u{e9}",
            "/a#b",
        ] {
            assert!(check(path).is_err(), "{path}");
        }
    }
}
