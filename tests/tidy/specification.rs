//! The promises of SPECIFICATION.md: each is short, stands there once, and names tests that exist.
//!
//! A row is `| promise | test |`. A test is named `file::test` in backticks; a script that is a test is named by its path.
//! Absent on purpose: judgement about whether a test proves its promise.

use std::{collections::BTreeMap, fs, path::Path};

use crate::expect_none;

const PAGE: &str = "SPECIFICATION.md";
/// Promises are read, not studied.
const PROMISE_CHARS_MAX: usize = 160;
/// The page has more rows than this; fewer means that the rows were not recognised.
const ROWS_MIN: usize = 300;

/// One line of a table.
struct PromiseRow<'a> {
    /// Its line in the page.
    line: usize,
    promise: &'a str,
    tests: &'a str,
}

/// Rows of the page, and lines of its tables that are no row.
fn split_rows(page: &str) -> (Vec<PromiseRow<'_>>, Vec<String>) {
    let (mut rows, mut places) = (Vec::new(), Vec::new());
    for (at, text) in page.lines().enumerate() {
        let Some(cells) = text.strip_prefix('|') else { continue };
        let cells: Vec<&str> = cells.trim_end_matches('|').split('|').map(str::trim).collect();
        match cells[..] {
            ["promise", "test"] | ["---", "---"] => {}
            [promise, tests] => rows.push(PromiseRow { line: at + 1, promise, tests }),
            _ => places.push(format!("{PAGE}:{}: a row has a promise and its tests", at + 1)),
        }
    }
    (rows, places)
}

/// Tests that a row names: those with `::`, and paths.
fn named_tests(cell: &str) -> impl Iterator<Item = &str> {
    let quoted = cell.split('`').skip(1).step_by(2);
    quoted.filter(|name| name.contains("::") || name.contains('/') && !name.contains(' '))
}

/// The reason why a named test is none; `read` gives the text of a file of the repository.
fn find_fault(name: &str, read: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let (path, function) = match name.split_once("::") {
        Some((path, function)) => (path, Some(function)),
        None => (name, None),
    };
    let Some(text) = read(path) else { return Some(format!("{name}: there is no file {path:?}")) };
    match function {
        Some(function) if defines(&text, function) => None,
        Some(function) => Some(format!("{name}: the file has no `fn {function}`")),
        None if path.ends_with(".rs") => Some(format!("{name}: a test in a Rust file has a name")),
        None => None,
    }
}

fn defines(text: &str, function: &str) -> bool {
    let goes_on = |rest: &str| rest.starts_with(|letter: char| letter.is_alphanumeric() || letter == '_');
    !function.is_empty()
        && text
            .split("fn ")
            .skip(1)
            .any(|after| after.strip_prefix(function).is_some_and(|rest| !goes_on(rest)))
}

/// Everything that is wrong with a page.
fn find_faults(page: &str, read: &impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (rows, mut places) = split_rows(page);
    let mut seen = BTreeMap::new();
    for PromiseRow { line, promise, tests } in rows {
        let mut report = |fault: String| places.push(format!("{PAGE}:{line}: {fault}"));
        let length = promise.chars().count();
        if length > PROMISE_CHARS_MAX {
            report(format!("{length} characters, {PROMISE_CHARS_MAX} at most: {promise}"));
        }
        if let Some(before) = seen.insert(promise, line) {
            report(format!("line {before} has the same promise: {promise}"));
        }
        if named_tests(tests).next().is_none() && !tests.contains("*pending*") {
            report(format!("a promise without a test is *pending*: {promise}"));
        }
        named_tests(tests).filter_map(|name| find_fault(name, read)).for_each(&mut report);
    }
    places
}

#[test]
fn every_promise_is_short_and_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let page = read(PAGE).expect("the specification can be read");
    let rows = split_rows(&page).0.len();
    assert!(rows > ROWS_MIN, "{rows} rows were found");
    expect_none("a promise is one short row with tests that exist", &find_faults(&page, &read));
}

#[test]
fn faults_of_a_specification_are_found() {
    let read = |path: &str| match path {
        "tests/a.rs" => Some("async fn it_holds(t: Bodies) {}\nfn it_holds_too() {}\n".to_owned()),
        "fuzz/run" => Some(String::new()),
        _ => None,
    };
    let faults = |row: &str| find_faults(&format!("| promise | test |\n| --- | --- |\n{row}\n"), &read);
    for good in [
        "| A. | `tests/a.rs::it_holds`, `tests/a.rs::it_holds_too` |",
        "| A. | `fuzz/run` |",
        "| A. | *pending*: seen by hand |",
        "No row.",
    ] {
        assert_eq!(faults(good), Vec::<String>::new(), "{good}");
    }
    let long = format!("| {} | `fuzz/run` |", "é".repeat(161));
    for bad in [
        "| A. | `tests/a.rs::it` |",
        "| A. | `tests/a.rs::` |",
        "| A. | `tests/b.rs::it_holds` |",
        "| A. | `tests/a.rs::it_holds`, `::it_holds_too` |",
        "| A. | `tests/a.rs` |",
        "| A. | `fuzz/walk` |",
        "| A. | seen by hand |",
        "| A. | |",
        "| A. | 1 | 2 |",
        "| A. | `fuzz/run` |\n| A. | `fuzz/run` |",
        long.as_str(),
    ] {
        assert_eq!(faults(bad).len(), 1, "{bad}: {:?}", faults(bad));
    }
}
