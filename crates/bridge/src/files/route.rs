//! Routes of paths: pure functions.
//!
//! Invariant: the longest prefix wins, and a prefix ends at a slash: `/memories` does not hold `/memories2`.
//! Invariant: a path that goes into a route and comes out of it again is the path that it was.

/// The prefixes of routes without a slash at their ends, longest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoutePrefixes(Vec<String>);

impl RoutePrefixes {
    /// Adds a prefix, and returns its place. Slashes at its end do not count.
    pub fn add(&mut self, prefix: &str) -> usize {
        let prefix = prefix.trim_end_matches('/').to_owned();
        let place = self.0.partition_point(|other| other.len() >= prefix.len());
        self.0.insert(place, prefix);
        place
    }

    /// The place of the route of a normalised path, and the path inside of it; none if no route has it.
    pub fn find(&self, path: &str) -> Option<(usize, String)> {
        self.0.iter().enumerate().find_map(|(place, prefix)| {
            let rest = path.strip_prefix(prefix.as_str())?;
            match rest {
                "" => Some((place, "/".to_owned())),
                _ if rest.starts_with('/') => Some((place, rest.to_owned())),
                _ => None,
            }
        })
    }

    /// The prefix of a route.
    pub fn get(&self, place: usize) -> &str {
        self.0.get(place).map_or("", String::as_str)
    }

    /// The path outside of a route for a path inside of it. A slash at its end stays: it marks a directory.
    pub fn join(&self, place: usize, inside: &str) -> String {
        let prefix = self.get(place);
        if inside == "/" && !prefix.is_empty() { prefix.to_owned() } else { format!("{prefix}{inside}") }
    }
}

/// The pattern for a route in a search of everything; none if the pattern cannot match there.
///
/// A pattern that names the route is anchored inside of it. Another pattern with a slash at its beginning is anchored at
/// the root, above all routes.
pub fn pattern_in_route(pattern: &str, prefix: &str) -> Option<String> {
    let bare = pattern.trim_start_matches('/');
    let below = prefix.trim_matches('/');
    match bare.strip_prefix(below).and_then(|rest| rest.strip_prefix('/')) {
        Some(rest) => Some(format!("/{rest}")),
        None if pattern.starts_with('/') => None,
        None => Some(pattern.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prefixes(texts: &[&str]) -> RoutePrefixes {
        let mut prefixes = RoutePrefixes::default();
        for text in texts {
            prefixes.add(text);
        }
        prefixes
    }

    fn found(texts: &[&str], path: &str) -> Option<(String, String)> {
        let prefixes = prefixes(texts);
        prefixes.find(path).map(|(place, inside)| (prefixes.get(place).to_owned(), inside))
    }

    #[test]
    fn the_longest_prefix_wins_and_ends_at_a_slash() {
        let texts = ["/memories/", "/memories/team/", "/agent"];
        let pair = |prefix: &str, inside: &str| Some((prefix.to_owned(), inside.to_owned()));
        assert_eq!(found(&texts, "/memories/a.md"), pair("/memories", "/a.md"));
        assert_eq!(found(&texts, "/memories"), pair("/memories", "/"));
        assert_eq!(found(&texts, "/memories/team"), pair("/memories/team", "/"));
        assert_eq!(found(&texts, "/memories/team/x/y"), pair("/memories/team", "/x/y"));
        assert_eq!(found(&texts, "/memories2"), None);
        assert_eq!(found(&texts, "/"), None);
        assert_eq!(found(&texts, "/work/memories/a"), None);
    }

    #[test]
    fn a_pattern_is_anchored_inside_of_the_route_that_it_names() {
        assert_eq!(pattern_in_route("/memories/**/*.md", "/memories").as_deref(), Some("/**/*.md"));
        assert_eq!(pattern_in_route("memories/*.md", "/memories/").as_deref(), Some("/*.md"));
        assert_eq!(pattern_in_route("*.md", "/memories").as_deref(), Some("*.md"));
        assert_eq!(pattern_in_route("src/*.md", "/memories").as_deref(), Some("src/*.md"));
        assert_eq!(pattern_in_route("/*.md", "/memories"), None);
    }

    fn part() -> impl Strategy<Value = String> {
        prop::sample::select(vec!["a", "b", "ab", "memories", "agent"]).prop_map(str::to_owned)
    }

    fn path() -> impl Strategy<Value = String> {
        prop::collection::vec(part(), 0..5).prop_map(|parts| format!("/{}", parts.join("/")))
    }

    proptest! {
        #[test]
        fn a_path_comes_out_as_it_went_in(
            texts in prop::collection::vec(prop::collection::vec(part(), 1..4), 0..5),
            path in path(),
        ) {
            let texts: Vec<String> = texts.iter().map(|parts| format!("/{}/", parts.join("/"))).collect();
            let mut prefixes = RoutePrefixes::default();
            for text in &texts {
                prefixes.add(text);
            }
            let under = |text: &String| format!("{path}/").starts_with(text.as_str());
            let longest = texts.iter().filter(|text| under(text)).map(String::len).max();
            match prefixes.find(&path) {
                Some((place, inside)) => {
                    prop_assert!(inside.starts_with('/'));
                    prop_assert_eq!(prefixes.join(place, &inside), path.clone());
                    prop_assert_eq!(Some(prefixes.get(place).len() + 1), longest);
                }
                None => prop_assert_eq!(longest, None),
            }
        }
    }
}
