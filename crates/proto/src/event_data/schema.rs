//! Generates the reference page of events from the tables: docs/reference/events.md between its two marks.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use serde_json::Value;

use super::{
    AgentBudget, AgentParent, AgentPosition, AgentSpec, ExecExit, ExecOutcome, ExecOutput, KeyQuota,
    LandedWork, LeaseTerms, MissingStep, ModelUsage, OutputContent, SavedSubmodule, SavedWork, SealedHead,
    SkippedFile, StoredMessage, Todo, kinds,
};
use crate::{
    AgentId, BodyId, ChainId, Enforcement, LayerId, SnapshotId, TemplateId,
    egress::EgressRule,
    launch::GuestEnd,
    lease::{OnTimeout, PauseMode},
    spec::PublicSpec,
    template::{BuildId, Tag},
    vm::StartReport,
};

const BEGIN: &str = "<!-- begin: generated from crates/proto/src/event_data; change it there, then UPDATE_DOCS=1 cargo test -p proto -->\n";
const END: &str = "<!-- end: generated -->\n";
const OR_NULL: &str = " or null";

/// The description of a type's JSON form.
pub trait JsonForm {
    /// The text in the table of the struct that contains it.
    fn form() -> String;

    /// Its own section of the page.
    fn section() -> Section {
        Section { title: "", meaning: "", fields: Vec::new() }
    }
}

/// A struct and its fields.
pub struct Section {
    pub title: &'static str,
    pub meaning: &'static str,
    pub fields: Vec<Field>,
}

/// One row of the table of a struct.
#[derive(Clone)]
pub struct Field {
    name: String,
    form: String,
    meaning: String,
}

pub fn always<T: JsonForm>(name: &str, meaning: &str) -> Vec<Field> {
    vec![Field { name: format!("`{name}`"), form: T::form(), meaning: meaning.trim().to_owned() }]
}

pub fn optional<T: JsonForm>(name: &str, meaning: &str) -> Vec<Field> {
    let form = T::form();
    let form = format!("{}, optional", form.strip_suffix(OR_NULL).unwrap_or(&form));
    vec![Field { name: format!("`{name}`"), form, meaning: meaning.trim().to_owned() }]
}

/// The fields of a type without a section of its own; for any other type, a link to its section.
pub fn beside<T: JsonForm>() -> Vec<Field> {
    match T::section() {
        Section { title: "", fields, .. } => fields,
        Section { title, meaning, .. } => vec![Field {
            name: format!("all fields of {}", link(title)),
            form: String::new(),
            meaning: meaning.to_owned(),
        }],
    }
}

pub fn link(title: &str) -> String {
    format!("[{title}](#{})", title.replace(' ', "-"))
}

macro_rules! forms {
    ($($type:ty => $form:expr),+ $(,)?) => {
        $( impl JsonForm for $type {
            fn form() -> String {
                $form.to_owned()
            }
        } )+
    };
}

forms! {
    String => "text",
    bool => "true or false",
    i32 => "number",
    u32 => "number",
    Value => "any JSON",
    AgentId => "id of an agent",
    u64 => "number",
    BodyId => "id of a Body",
    ChainId => "`body/ID`, `agent/ID`, `node/ID` or `log`",
    LayerId => "id of a layer",
    SnapshotId => "id of a snapshot",
    TemplateId => "id of a template",
    BuildId => "id of a build",
    Tag => "`build` and `since`",
    PublicSpec => link("spec"),
    Enforcement => link("enforcement"),
    GuestEnd => link("body end"),
    std::net::IpAddr => "IP address",
    EgressRule => "rule: `to`, and where they are given `action` (`allow`, `deny` or `ask`), `query`, `headers`, `set_headers`, `window`, `limit`, `respond`, `forward`, `why`, `match` and `not_match`",
    OnTimeout => "`\"kill\"`, `{\"pause\":\"memory\"}` or `{\"pause\":\"files\"}`",
    PauseMode => "`\"memory\"` or `\"files\"`",
}

impl<T: JsonForm> JsonForm for Option<T> {
    fn form() -> String {
        T::form() + OR_NULL
    }
}

impl<T: JsonForm> JsonForm for Vec<T> {
    fn form() -> String {
        format!("list: {}", T::form())
    }
}

/// As a part of another struct, a map has one field for each of its names.
impl<T: JsonForm> JsonForm for BTreeMap<String, T> {
    fn form() -> String {
        format!("object by name: {}", T::form())
    }

    fn section() -> Section {
        let field = Field {
            name: "the name of an entry".to_owned(),
            form: T::form(),
            meaning: "Its new value.".to_owned(),
        };
        Section { title: "", meaning: "", fields: vec![field] }
    }
}

impl JsonForm for StartReport {
    fn form() -> String {
        link("receipt")
    }

    fn section() -> Section {
        Section { title: "receipt", meaning: "The receipt of the guest.", fields: Vec::new() }
    }
}

impl JsonForm for ExecOutcome {
    fn form() -> String {
        "object".to_owned()
    }

    fn section() -> Section {
        let error = "Why the command did not start; then the event has only `exec` and this field.";
        let fields = [ExecExit::section().fields, optional::<String>("error", error)].concat();
        Section { title: "", meaning: "", fields }
    }
}

impl JsonForm for OutputContent {
    fn form() -> String {
        "object".to_owned()
    }

    fn section() -> Section {
        let fields = [
            optional::<String>("text", "The output, if it is at most 4 KiB of UTF-8."),
            optional::<String>("hex", "The output in hexadecimal, if it is at most 4 KiB and not UTF-8."),
            optional::<String>(
                "artifact",
                "The SHA-256 of longer output: a file in `artifacts/` of the data directory, below its first two digits.",
            ),
        ];
        Section { title: "", meaning: "", fields: fields.concat() }
    }
}

fn table(text: &mut String, fields: &[Field]) {
    text.push_str("| field | form | meaning |\n| --- | --- | --- |\n");
    for Field { name, form, meaning } in fields {
        writeln!(text, "| {name} | {form} | {meaning} |").unwrap();
    }
}

fn generated() -> String {
    let mut text = String::from("| type | meaning |\n| --- | --- |\n");
    let kinds = kinds::sections();
    for (kind, names) in &kinds {
        let earlier: Vec<String> = names[1..].iter().map(|name| format!("`{name}`")).collect();
        let earlier = match &earlier[..] {
            [] => String::new(),
            names => format!(" Earlier versions wrote {}.", names.join(", ")),
        };
        writeln!(
            text,
            "| [`{0}`](#{1}) | {2}{earlier} |",
            kind.title,
            kind.title.replace('.', ""),
            kind.meaning
        )
        .unwrap();
    }
    for (kind, _) in &kinds {
        writeln!(text, "\n### `{}`\n\n{}\n", kind.title, kind.meaning).unwrap();
        table(&mut text, &kind.fields);
    }
    let parts = [
        LeaseTerms::section(),
        MissingStep::section(),
        ExecOutput::section(),
        SavedWork::section(),
        SkippedFile::section(),
        SavedSubmodule::section(),
        LandedWork::section(),
        SealedHead::section(),
        KeyQuota::section(),
        AgentSpec::section(),
        AgentBudget::section(),
        AgentParent::section(),
        AgentPosition::section(),
        StoredMessage::section(),
        ModelUsage::section(),
        Todo::section(),
    ];
    for part in &parts {
        writeln!(text, "\n### {}\n\n{}\n", part.title, part.meaning).unwrap();
        table(&mut text, &part.fields);
    }
    text
}

#[test]
fn the_reference_page_has_every_kind_as_the_code_has_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/events.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has the mark where generated text begins");
    let (_, after) = rest.split_once(END).expect("the page has the mark where generated text ends");
    let fresh = [before, BEGIN, "\n", &generated(), "\n", END, after].concat();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, fresh).unwrap();
    } else {
        assert!(page == fresh, "docs/reference/events.md is stale: UPDATE_DOCS=1 cargo test -p proto");
    }
}

#[test]
fn every_link_of_the_generated_text_has_a_heading() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/events.md");
    let page = fs::read_to_string(path).unwrap();
    let anchor = |heading: &str| heading.to_lowercase().replace(['`', '.'], "").trim().replace(' ', "-");
    let headings: Vec<String> = page
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect();
    for link in page.split("](#").skip(1).filter_map(|rest| rest.split_once(')')) {
        assert!(headings.iter().any(|heading| heading == link.0), "no heading for #{}", link.0);
    }
}
