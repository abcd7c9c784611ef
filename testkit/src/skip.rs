//! Skips: which ones the suite expects, and on what kind of host.

/// Something that cannot be shown on some hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Skip {
    /// What is not shown.
    pub what: &'static str,
    /// Why, and so where it is shown.
    pub why: &'static str,
}

/// Every skip that may happen. A test that skips for another reason fails.
pub const EXPECTED: &[Skip] = &[
    Skip { what: "as an ordinary user", why: "the whole suite runs as one already" },
    Skip { what: "for root", why: "the suite runs it as an ordinary user" },
    Skip { what: "as root", why: "the suite was started by an ordinary user" },
];

/// Says that something is not shown here. Panics when nobody expects that.
pub fn skip(what: &str) {
    let found = EXPECTED.iter().find(|skip| skip.what == what);
    let Some(skip) = found else { panic!("a skip that the suite does not expect: {what}") };
    eprintln!("skipped {}: {}", skip.what, skip.why);
}
