//! The rules that a machine can hold: names of types, doc comments, first words of sentences, the size of
//! types, promises.
//!
//! Each test reads the sources and the documentation of the whole repository and lists every place that
//! breaks a rule.
//! Absent on purpose: judgement about good names. The tests find only what is certainly wrong.

mod source;
mod specification;

use std::collections::{BTreeMap, BTreeSet};

use source::{Comment, Source, Texts};

/// Single words that are not nouns: participles, prepositions, adverbs, question words and the like.
const BANNED_TYPES: &[&str] = &[
    "About",
    "Above",
    "Absent",
    "After",
    "Again",
    "Ahead",
    "All",
    "Along",
    "Apart",
    "Around",
    "Arriving",
    "At",
    "Away",
    "Before",
    "Begin",
    "Begun",
    "Behind",
    "Below",
    "Beside",
    "Besides",
    "Between",
    "Both",
    "Breakable",
    "Bring",
    "Brought",
    "By",
    "Coming",
    "Copying",
    "Cut",
    "Dirty",
    "Doing",
    "Drawn",
    "During",
    "Endless",
    "Ends",
    "Fake",
    "First",
    "Follow",
    "Found",
    "Fresh",
    "From",
    "Frozen",
    "Full",
    "Given",
    "Gone",
    "Half",
    "Hear",
    "Heard",
    "Held",
    "Here",
    "How",
    "Hurried",
    "Inner",
    "Inside",
    "Into",
    "Kept",
    "Known",
    "Large",
    "Last",
    "Late",
    "Lately",
    "Later",
    "Left",
    "Less",
    "Lie",
    "Long",
    "Loose",
    "Lost",
    "Made",
    "Many",
    "Masters",
    "Met",
    "More",
    "Nearly",
    "Nobodys",
    "Now",
    "Of",
    "Off",
    "On",
    "Once",
    "One",
    "Only",
    "Onto",
    "Open",
    "Other",
    "Others",
    "Out",
    "Outside",
    "Over",
    "Own",
    "Passing",
    "Plain",
    "Private",
    "Quiet",
    "Ran",
    "Raw",
    "Ready",
    "Rest",
    "Running",
    "Said",
    "Same",
    "Say",
    "Seen",
    "Sent",
    "Since",
    "Skim",
    "Small",
    "Some",
    "Soon",
    "Sort",
    "Stand",
    "Standing",
    "Starting",
    "Still",
    "Take",
    "Taken",
    "Talk",
    "Tell",
    "Tend",
    "Then",
    "There",
    "Through",
    "Tight",
    "Till",
    "To",
    "Together",
    "Told",
    "Under",
    "Unheard",
    "Unknown",
    "Unsaid",
    "Unshown",
    "Unsure",
    "Until",
    "Up",
    "Warm",
    "What",
    "When",
    "Where",
    "Whether",
    "Which",
    "While",
    "Who",
    "Whole",
    "Whom",
    "Whose",
    "Why",
    "Wide",
    "With",
    "Within",
    "Without",
    "Wrong",
];

/// Words with the ending `-ed` that are nouns or names.
const NOUNS_ON_ED: &[&str] = &["Seed", "Feed", "Speed", "Need"];

/// Names that more than one crate may define, and why.
const SHARED_TYPES: &[(&str, &str)] = &[
    ("Error", "the name that Rust's traits give to their error"),
    ("World", "each suite of kills has its own model of the world"),
];

/// First words that are never the subject of a sentence.
const NO_SUBJECTS: &[&str] = &["who", "what", "whoever", "whatever", "nobody", "somebody"];

/// Continuations that make "The same" depend on the text before it.
const SAME_AS_BEFORE: &[&str] = &[
    "as", "at", "but", "by", "for", "from", "if", "in", "of", "on", "once", "over", "that", "through", "to",
    "under", "when", "where", "while", "with", "without",
];

/// Fails with every place, grouped under the rule.
fn expect_none(rule: &str, places: &[String]) {
    assert!(places.is_empty(), "{rule}: {} places\n{}", places.len(), places.join("\n"));
}

fn is_one_word(name: &str) -> bool {
    name.chars().skip(1).all(|letter| letter.is_ascii_lowercase())
}

fn is_banned(name: &str) -> bool {
    is_one_word(name)
        && (BANNED_TYPES.contains(&name) || name.ends_with("ed") && !NOUNS_ON_ED.contains(&name))
}

#[test]
fn a_type_is_named_by_a_noun() {
    let mut places = Vec::new();
    for source in Texts::read().sources() {
        for (line, name) in source.types() {
            if is_banned(name) {
                places.push(format!("{}:{line}: {name}", source.path));
            }
        }
    }
    expect_none("a type's name is a noun, not a participle, preposition, adverb or question word", &places);
}

#[test]
fn a_type_name_belongs_to_one_crate() {
    let texts = Texts::read();
    let mut defined: BTreeMap<&str, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
    for source in texts.sources() {
        for (line, name) in source.types() {
            let place = format!("{}:{line}", source.path);
            defined.entry(name).or_default().entry(source.package()).or_default().push(place);
        }
    }
    let shared: BTreeSet<&str> = SHARED_TYPES.iter().map(|(name, _)| *name).collect();
    let places: Vec<String> = defined
        .iter()
        .filter(|(name, crates)| crates.len() > 1 && !shared.contains(*name))
        .map(|(name, crates)| {
            format!("{name}: {}", crates.values().flatten().cloned().collect::<Vec<_>>().join(" "))
        })
        .collect();
    expect_none("two crates define a type of one name", &places);
}

#[test]
fn a_module_file_begins_with_its_doc() {
    let texts = Texts::read();
    let undocumented = |source: &&Source| !source.text.starts_with("//!");
    let places: Vec<String> =
        texts.sources().filter(undocumented).map(|source| source.path.clone()).collect();
    expect_none("a module file begins with `//!`", &places);
}

#[test]
fn no_doc_comment_leans_on_the_one_before() {
    let mut places = Vec::new();
    for source in Texts::read().sources() {
        for comment in source.comments().filter(|comment| comment.is_doc) {
            for (line, sentence) in comment.sentences() {
                if leans_on_another(&sentence) {
                    places.push(format!("{}:{line}: {sentence}", source.path));
                }
            }
        }
    }
    expect_none("a doc comment is readable alone, without \"The same, …\"", &places);
}

fn leans_on_another(sentence: &str) -> bool {
    let Some(rest) = sentence.strip_prefix("The same") else { return false };
    let word: String = rest.trim_start().chars().take_while(|letter| letter.is_alphabetic()).collect();
    rest.is_empty() || rest.starts_with([',', '.', ';', ':']) || SAME_AS_BEFORE.contains(&word.as_str())
}

#[test]
fn a_comment_names_its_actor() {
    let mut places = Vec::new();
    for source in Texts::read().sources() {
        for comment in source.comments() {
            places.extend(nameless(&source.path, comment.sentences()));
        }
    }
    expect_none("a sentence in a comment names its actor", &places);
}

#[test]
fn a_page_names_its_actors() {
    let mut places = Vec::new();
    for (path, text) in Texts::read().pages() {
        places.extend(nameless(path, source::sentences_of_page(text)));
    }
    expect_none("a sentence in the documentation names its actor", &places);
}

#[test]
fn a_message_names_its_actor() {
    let mut places = Vec::new();
    for source in Texts::read().sources().filter(|source| source.is_production()) {
        for (line, text) in source.messages() {
            if lacks_actor(&text) {
                places.push(format!("{}:{line}: {text}", source.path));
            }
        }
    }
    expect_none("an error or a hint names its actor", &places);
}

fn nameless(path: &str, sentences: Vec<(usize, String)>) -> Vec<String> {
    let nameless = sentences.into_iter().filter(|(_, sentence)| lacks_actor(sentence));
    nameless.map(|(line, sentence)| format!("{path}:{line}: {sentence}")).collect()
}

/// A question may begin so: it asks for the actor.
fn lacks_actor(sentence: &str) -> bool {
    let word: String = sentence.chars().take_while(|letter| letter.is_alphabetic()).collect();
    NO_SUBJECTS.contains(&word.to_lowercase().as_str()) && !sentence.trim_end().ends_with('?')
}

/// A struct with more methods than this has more than one owner.
const METHODS_MAX: usize = 60;

#[test]
fn a_type_of_the_fleet_has_few_methods() {
    let texts = Texts::read();
    let mut methods: BTreeMap<&str, usize> = BTreeMap::new();
    for source in texts.sources().filter(|source| source.path.starts_with("crates/fleet/src/")) {
        for name in source.methods() {
            *methods.entry(name).or_default() += 1;
        }
    }
    assert!(methods.contains_key("Fleet"), "the methods of `Fleet` were not found");
    let places: Vec<String> = methods
        .iter()
        .filter(|(_, count)| **count > METHODS_MAX)
        .map(|(name, count)| format!("{name}: {count} methods, at most {METHODS_MAX}"))
        .collect();
    expect_none("a type has too many methods", &places);
}

/// Files of the fleet, the server and the command line that may name a layer, and why.
const LAYER_FILES: &[(&str, &str)] = &[
    ("crates/fleet/src/drivers.rs", "maps a layer to its driver"),
    ("crates/fleet/src/vm/driver.rs", "is the driver of a layer"),
    ("crates/server/src/v1/models.rs", "parses a request"),
    ("crates/cli/src/commands/doctor.rs", "prints the layers"),
];

#[test]
fn a_layer_is_named_by_its_driver_and_the_registry_alone() {
    const CRATES: [&str; 3] = ["crates/fleet", "crates/server", "crates/cli"];
    const LAYERS: [&str; 4] = ["Layer::Process", "Layer::Container", "Layer::Wasm", "Layer::Microvm"];
    let texts = Texts::read();
    let mut named: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for source in
        texts.sources().filter(|source| source.is_production() && CRATES.contains(&source.package()))
    {
        for (line, text) in source.production_lines() {
            if LAYERS.iter().any(|layer| text.contains(layer)) {
                let place = format!("{}:{line}: {}", source.path, text.trim());
                named.entry(&source.path).or_default().push(place);
            }
        }
    }
    let missing: Vec<String> = LAYER_FILES
        .iter()
        .filter(|(path, _)| named.remove(path).is_none())
        .map(|(path, _)| (*path).to_owned())
        .collect();
    expect_none(
        "ask a layer's driver for its capabilities instead of naming the layer",
        &named.into_values().flatten().collect::<Vec<_>>(),
    );
    expect_none("a file that names no layer needs no exception", &missing);
}

#[test]
fn the_rules_find_what_they_are_for() {
    for bad in ["Asked", "Found", "Beside", "How", "Unsaid"] {
        assert!(is_banned(bad), "{bad}");
    }
    for good in ["Seed", "SkippedPath", "FoundKernel", "Layer"] {
        assert!(!is_banned(good), "{good}");
    }
    for bad in ["The same, by number.", "The same with files.", "The same.", "The same as it stands in JSON."]
    {
        assert!(leans_on_another(bad), "{bad}");
    }
    assert!(!leans_on_another("The same directory in our tree."));
    for bad in ["Who asks.", "What a Body uses.", "nobody is there", "Whoever waits."] {
        assert!(lacks_actor(bad), "{bad}");
    }
    for good in ["What is a Body?", "Whatsoever", "The caller waits."] {
        assert!(!lacks_actor(good), "{good}");
    }
    let source = Source::new(
        "crates/x/src/a.rs",
        "//! A page.\n\n/// First one. What it is.\n/// Goes on.\nstruct Asked;\n// Plain.\nfn f() {\n    \
         say(\"nobody is there\");\n}\n",
    );
    assert_eq!(source.types().collect::<Vec<_>>(), [(5, "Asked")]);
    let sentences: Vec<(usize, String)> =
        source.comments().flat_map(|comment: &Comment| comment.sentences()).collect();
    let expected = [(1, "A page."), (3, "First one."), (3, "What it is."), (4, "Goes on."), (6, "Plain.")];
    assert_eq!(sentences, expected.map(|(line, text)| (line, text.to_owned())));
    assert_eq!(source.messages(), [(8, "nobody is there".to_owned())]);
    let source = Source::new(
        "crates/x/src/b.rs",
        "//! A page.\n\nimpl A {\n    pub(crate) async fn b() {}\n\n    const fn c() {\n        fn inner() {}\n    \
         }\n}\n\nimpl<T: D<E>> F<'_, T> {\n    fn g() {}\n}\n\nimpl Drop for A {\n    fn drop(&mut self) {}\n}\n\nfn \
         free() {}\n",
    );
    assert_eq!(source.methods().collect::<Vec<_>>(), ["A", "A", "F"]);
}
