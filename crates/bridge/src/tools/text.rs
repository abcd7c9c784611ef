//! Lengths of results, as Deep Agents limits them.

use super::python;

/// The longest result of a tool that limits itself, in characters.
pub const RESULT_LEN_MAX: usize = 80_000;
/// The last item of a result that was cut.
const CUT: &str = "... [results truncated, try being more specific with your parameters]";

/// Whether a result lists everything that there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// It does.
    Whole,
    /// There is more.
    Partial,
}

/// A list of paths as a model reads it.
pub fn show_paths(paths: &[String], completeness: Completeness) -> String {
    if paths.is_empty() {
        return "No files found".to_owned();
    }
    let room = RESULT_LEN_MAX - python::repr(CUT).chars().count() - 2;
    let mut used = 0;
    let fitting = paths.iter().take_while(|path| {
        used += python::repr(path).chars().count() + 2;
        used <= room
    });
    let mut shown: Vec<&str> = fitting.map(String::as_str).collect();
    if shown.len() < paths.len() || completeness == Completeness::Partial {
        shown.push(CUT);
    }
    python::repr_list(&shown)
}

/// A text, cut if it is too long.
pub fn cut(text: String) -> String {
    if text.len() <= RESULT_LEN_MAX || text.chars().count() <= RESULT_LEN_MAX {
        return text;
    }
    let kept: String = text.chars().take(RESULT_LEN_MAX - CUT.chars().count() - 1).collect();
    format!("{kept}\n{CUT}")
}

/// The beginning of a text that an error quotes.
pub fn quoted(text: &str) -> &str {
    const QUOTED_LEN_MAX: usize = 4000;
    &text[..text.floor_char_boundary(QUOTED_LEN_MAX.min(text.len()))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_texts_are_cut_as_in_deep_agents() {
        assert_eq!(show_paths(&[], Completeness::Whole), "No files found");
        assert_eq!(show_paths(&["/a".into()], Completeness::Whole), "['/a']");
        let many: Vec<String> = (0..20_000).map(|number| format!("/file{number:06}")).collect();
        let shown = show_paths(&many, Completeness::Whole);
        assert!(shown.len() <= RESULT_LEN_MAX && shown.ends_with(&format!(", '{CUT}']")));
        let long = cut("é".repeat(RESULT_LEN_MAX + 1));
        assert_eq!(long.chars().count(), RESULT_LEN_MAX);
        assert!(long.ends_with(&format!("é\n{CUT}")));
        let exact = "x".repeat(RESULT_LEN_MAX);
        assert_eq!(cut(exact.clone()), exact);
    }
}
