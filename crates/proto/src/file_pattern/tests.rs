//! Tests of patterns: examples, hostile ones, and a comparison with a model that is simple and slow.

use proptest::prelude::*;

use super::*;

fn matches(pattern: &str, path: &str) -> bool {
    FilePattern::new(pattern).unwrap().matches(path)
}

#[test]
fn patterns_mean_what_deep_agents_means() {
    for (pattern, yes, no) in [
        (
            "*.py",
            &["a.py", "src/b.py", ".github/c.py", "a/.b/c.py"][..],
            &[".a.py", "src/.b.py", "a.pyc"][..],
        ),
        (".*", &[".env", "a/.env"], &["env", ".git/config"]),
        ("src/*.py", &["src/a.py"], &["a.py", "src/x/a.py", "x/src/a.py", "src/.a.py"]),
        ("/*.py", &["a.py"], &["src/a.py"]),
        ("src//a.py", &["src/a.py"], &["a.py"]),
        ("./src/*.py", &["src/a.py"], &["a.py"]),
        ("**/*.py", &["a.py", "x/y/a.py"], &[".github/a.py", "x/.y/a.py", ".a.py"]),
        ("**/.env", &[".env", "a/b/.env"], &[".git/.env"]),
        (".github/**/*.yml", &[".github/a.yml", ".github/w/ci.yml"], &["a.yml", ".github/.x/a.yml"]),
        ("src/**", &["src/a", "src/b/c"], &["src", "src/.a", "src/b/.c", "a"]),
        ("a.py/**", &[], &["a.py"]),
        ("src/", &[], &["src", "src/a"]),
        ("src/**/", &["src/a"], &["src"]),
        ("**/a/**/b", &["a/b", "x/a/y/z/b", "a/a/b/b"], &["a", "b", "b/a"]),
        ("*.{py,rs}", &["a.py", "x/b.rs"], &["a.{py,rs}", "a.c"]),
        ("{src,test}/*.{c,h}", &["src/a.c", "test/b.h"], &["doc/a.c", "src/x/a.c"]),
        ("{a,{b,c}d}", &["a", "bd", "cd"], &["b", "ad"]),
        ("{x}", &["{x}"], &["x"]),
        ("*.{py", &["a.{py"], &["a.py"]),
        ("{x}{a,b}", &["{x}a", "{x}b"], &["xa"]),
        ("[a-c]?[!0-9]", &["axz", "b_x"], &["dxz", "ax1", "a"]),
        ("[^a]*", &["bcd"], &["abc"]),
        ("[]]", &["]"], &["["]),
        ("[!]]", &["x"], &["]"]),
        ("[a-", &["[a-"], &["a", "-"]),
        ("[z-a]", &[], &["z", "a", "m", "-"]),
        ("[-x]", &["-", "x"], &["y"]),
        ("a**b", &["ab", "axyb"], &["a/b"]),
        ("ž?", &["žř"], &["ž"]),
        ("*a*b*c", &["xxaxxbxxc", "abc"], &["acb"]),
    ] {
        for path in yes {
            assert!(matches(pattern, path), "{pattern} must match {path}");
        }
        for path in no {
            assert!(!matches(pattern, path), "{pattern} must not match {path}");
        }
    }
}

#[test]
fn directories_without_matches_are_not_entered() {
    let enters = |pattern: &str, path: &[&str]| {
        let pattern = FilePattern::new(pattern).unwrap();
        path.iter().try_fold(pattern.start(), |at, part| pattern.enter(&at, part)).is_some()
    };
    assert!(enters("src/**/*.rs", &["src", "a", "b"]) && !enters("src/**/*.rs", &["target"]));
    assert!(!enters("src/*.rs", &["src", "a"]) && !enters("**/*.rs", &[".git"]));
    assert!(enters("*.rs", &[".git", "x"]));
}

#[test]
fn hostile_patterns_are_refused_or_fast() {
    for bad in
        ["../*.py", "a/../b", "a\\..\\b", &"x".repeat(5000), &"{a,b}".repeat(1000), &"{a,b}".repeat(10)]
    {
        assert!(FilePattern::new(bad).is_err(), "{bad}");
    }
    let nine = format!("{}z", "{a,b}".repeat(9));
    assert!(matches(&nine, "ababababaz") && !matches(&nine, "z"));
    for odd in ["{".repeat(1000), "{a}".repeat(1000), "}".repeat(1000), "{,".repeat(1000), "[".repeat(4000)] {
        let _ = FilePattern::new(&odd).map(|pattern| pattern.matches("a/b/c"));
    }
    let name = "a".repeat(255);
    assert!(!matches(&format!("{}b", "*a".repeat(2000)), &name));
    let deep = format!("{}b", "**/a/".repeat(800));
    assert!(!matches(&deep, &"a/".repeat(2000)));
}

#[test]
fn patterns_match_as_deep_agents_do() {
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("*.py", &["a.py", "src/app/main.py", ".git/x.py"], &["a.pyc", ".a.py", "a.py/x"]),
        (".*", &[".env", "a/.env"], &["env"]),
        ("/*.py", &["top.py"], &["src/app.py"]),
        ("src/**/*.py", &["src/a.py", "src/x/y/a.py"], &["a.py", "src/.x/a.py", "x/src/a.py"]),
        ("**/*.yml", &["a.yml", "x/a.yml"], &[".github/a.yml", "x/.a.yml"]),
        ("**", &["a", "x/b"], &[".a"]),
        ("src/**", &["src/a", "src/x/y"], &["src", "src/.a", "src/x/.b", "a"]),
        ("a.py/**", &["a.py/x"], &["a.py"]),
        ("src/", &[], &["src", "src/a"]),
        ("src/**/", &["src/a", "src/a/b"], &["src"]),
        ("a//b.py", &["a/b.py"], &["a/x/b.py"]),
        ("*.{ts,tsx}", &["a.ts", "x/a.tsx"], &["a.t"]),
        ("{a,b{c,d}}.x", &["a.x", "bc.x", "bd.x"], &["b.x", "c.x"]),
        ("{a}.x", &["{a}.x"], &["a.x"]),
        ("{a,b", &["{a,b"], &["a"]),
        ("[ab]?", &["ax", "b1"], &["a", "cx"]),
        ("[!a]", &["b"], &["a"]),
        ("[^a]", &["b"], &["a"]),
        ("[a-c].x", &["b.x"], &["d.x", "-.x"]),
        ("[]a]", &["]", "a"], &["b"]),
        ("[a", &["[a"], &["a"]),
        ("a*b*c", &["abc", "aXbYc", "abbc"], &["ab", "acb"]),
        ("A.py", &["A.py"], &["a.py"]),
        ("", &[], &["a"]),
        ("é?.txt", &["éx.txt"], &["e.txt"]),
    ];
    for (pattern, yes, no) in cases {
        for path in *yes {
            assert!(matches(pattern, path), "{pattern} matches {path}");
        }
        for path in *no {
            assert!(!matches(pattern, path), "{pattern} does not match {path}");
        }
    }
}

#[test]
fn bad_patterns_are_refused() {
    for bad in ["../x", "a/../b", "a\\..\\b", "..", &"a".repeat(PATTERN_LEN_MAX + 1)] {
        assert_eq!(FilePattern::new(bad).unwrap_err(), PatternError::Invalid, "{bad:.20}");
    }
    assert!(FilePattern::new("a..b").is_ok());
    assert_eq!(FilePattern::new(&"{a,b}".repeat(12)).unwrap_err(), PatternError::TooBroad);
    assert!(FilePattern::new(&"{".repeat(4000)).is_ok());
}

#[test]
fn patterns_that_backtrack_end_soon() {
    let name = "a".repeat(5000);
    assert!(!matches(&format!("{}b", "a*".repeat(500)), &name));
    let path = vec!["a"; 500].join("/");
    assert!(!matches(&format!("{}b", "**/*/".repeat(300)), &path));
}

/// A pattern of a part of a path, tried in every way.
fn model_name(pattern: &[char], name: &[char]) -> bool {
    match pattern {
        [] => name.is_empty(),
        ['*', rest @ ..] => (0..=name.len()).any(|taken| model_name(rest, &name[taken..])),
        ['?', rest @ ..] => !name.is_empty() && model_name(rest, &name[1..]),
        ['[', not @ ('!' | '^'), one, ']', rest @ ..] if *not != ']' => {
            name.first().is_some_and(|found| found != one) && model_name(rest, &name[1..])
        }
        ['[', one, ']', rest @ ..] => name.first() == Some(one) && model_name(rest, &name[1..]),
        [one, rest @ ..] => name.first() == Some(one) && model_name(rest, &name[1..]),
    }
}

fn model_part(pattern: &str, name: &str) -> bool {
    let hidden = name.starts_with('.') && !pattern.starts_with('.');
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    !hidden && model_name(&pattern, &name)
}

/// The parts of a path against the parts of a pattern, tried in every way.
fn model_path(pattern: &[&str], path: &[&str]) -> bool {
    match pattern {
        [] => path.is_empty(),
        ["**"] => !path.is_empty() && path.iter().all(|part| !part.starts_with('.')),
        ["**", "**", ..] => model_path(&pattern[1..], path),
        ["**", rest @ ..] => (0..=path.len())
            .take_while(|taken| path[..*taken].iter().all(|part| !part.starts_with('.')))
            .any(|taken| model_path(rest, &path[taken..])),
        [one, rest @ ..] => {
            path.first().is_some_and(|part| model_part(one, part)) && model_path(rest, &path[1..])
        }
    }
}

fn part_pattern() -> impl Strategy<Value = String> {
    let item = prop_oneof![
        3 => "[ab.]".prop_map(|text| text),
        2 => Just("*".to_owned()),
        1 => Just("?".to_owned()),
        1 => Just("[a]".to_owned()),
        1 => Just("[!b]".to_owned()),
        1 => Just("[^.]".to_owned()),
    ];
    prop::collection::vec(item, 1..5)
        .prop_map(|items| items.concat())
        .prop_filter("`..` is refused, and `.` is no name", |part| {
            part != ".." && part != "." && part != "**"
        })
}

fn path_name() -> impl Strategy<Value = String> {
    "[ab.]{1,4}".prop_filter("no name of a file", |name| name != "." && name != "..")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn names_match_as_the_model_says(pattern in part_pattern(), path in prop::collection::vec(path_name(), 1..4)) {
        let wanted = model_part(&pattern, path.last().unwrap());
        prop_assert_eq!(matches(&pattern, &path.join("/")), wanted);
    }

    #[test]
    fn paths_match_as_the_model_says(
        pattern in prop::collection::vec(prop_oneof![Just("**".to_owned()), part_pattern()], 1..5),
        path in prop::collection::vec(path_name(), 1..5),
    ) {
        let parts: Vec<&str> = pattern.iter().map(String::as_str).collect();
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        let wanted = model_path(&parts, &names);
        prop_assert_eq!(matches(&format!("/{}", pattern.join("/")), &path.join("/")), wanted);
    }

    #[test]
    fn alternatives_match_if_one_of_them_does(
        forms in prop::collection::vec(part_pattern(), 2..4),
        tail in "[ab]{0,2}",
        name in path_name(),
    ) {
        let wanted = forms.iter().any(|form| matches(&format!("{form}{tail}"), &name));
        prop_assert_eq!(matches(&format!("{{{}}}{tail}", forms.join(",")), &name), wanted);
    }

    #[test]
    fn no_pattern_makes_the_matcher_fail(pattern in "[-a{},*?\\[\\]!/.^\\\\]{0,40}", path in "[-a{},*\\[\\]/.]{0,20}") {
        if let Ok(pattern) = FilePattern::new(&pattern) {
            let _ = pattern.matches(&path);
        }
    }

    #[test]
    fn a_text_without_signs_matches_itself_only(name in "[a-z]{1,6}", other in "[a-z]{1,6}") {
        prop_assert_eq!(matches(&name, &other), name == other);
        let (deep, anchored) = (format!("x/y/{name}"), format!("/{name}"));
        prop_assert!(matches(&name, &deep));
        prop_assert!(!matches(&anchored, &deep));
    }

}
