//! The file of rules: TOML, checked line by line, refused as a whole if one rule is wrong.

use proto::event_data::CallRisk;
use serde::Deserialize;
use toml::Spanned;

use super::{
    CallRule, CommandPattern, CommandRule, Fit, PathPattern, RiskRule, RuleDecision, RuleSet, RuleSubject,
    WordPattern,
};
use crate::library::{
    LibraryError,
    command::read_command,
    error::{check_len, line_at},
};

/// The longest file.
const FILE_LEN_MAX: usize = 256 << 10;
/// The most rules of a file.
const RULES_MAX: usize = 512;
/// The most words of a pattern.
const TOKENS_MAX: usize = 64;
/// The longest word of a pattern, and the longest path.
const TOKEN_LEN_MAX: usize = 1_024;
/// The longest reason.
const WHY_LEN_MAX: usize = 500;
/// The most examples of a rule, of each kind.
const EXAMPLES_MAX: usize = 64;
/// The longest example.
const EXAMPLE_LEN_MAX: usize = 2_048;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    #[serde(default)]
    rule: Vec<Spanned<RuleText>>,
    #[serde(default)]
    risk: Vec<Spanned<RiskText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    decision: RuleDecision,
    tool: Option<String>,
    command: Option<Vec<String>>,
    into: Option<Vec<String>>,
    then: Option<Vec<String>>,
    #[serde(default)]
    except: Vec<Vec<String>>,
    path: Option<String>,
    why: String,
    #[serde(default, rename = "match")]
    matches: Vec<String>,
    #[serde(default)]
    not_match: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RiskText {
    level: RiskLevel,
    command: Vec<String>,
    into: Option<Vec<String>>,
    then: Option<Vec<String>>,
    #[serde(default)]
    except: Vec<Vec<String>>,
    why: String,
    #[serde(default, rename = "match")]
    matches: Vec<String>,
    #[serde(default)]
    not_match: Vec<String>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum RiskLevel {
    Outside,
    Untrusted,
}

/// A fault of a rule, and how to mend it.
type Fault = (String, String);

impl RuleSet {
    /// Reads a file of rules and checks every rule against its examples.
    pub fn parse(file: &str, text: &str) -> Result<Self, LibraryError> {
        check_len(file, text, FILE_LEN_MAX)?;
        let read: RuleFile =
            toml::from_str(text).map_err(|error| LibraryError::from_toml(file, text, &error))?;
        if read.rule.len() + read.risk.len() > RULES_MAX {
            let fault = format!("the file has more than {RULES_MAX} rules");
            return Err(LibraryError::new(file, 1, fault, "join rules with * and {a,b}, or remove some"));
        }
        let mut set = Self::default();
        for rule in read.rule {
            let line = line_at(text, rule.span().start);
            let rule = read_rule(rule.into_inner(), format!("{file}:{line}"));
            set.rules.push(rule.map_err(|(fault, mend)| LibraryError::new(file, line, fault, mend))?);
        }
        for risk in read.risk {
            let line = line_at(text, risk.span().start);
            let risk = read_risk(risk.into_inner());
            set.risks.push(risk.map_err(|(fault, mend)| LibraryError::new(file, line, fault, mend))?);
        }
        Ok(set)
    }
}

fn read_rule(text: RuleText, place: String) -> Result<CallRule, Fault> {
    check_why(&text.why)?;
    check_examples(&text.matches, &text.not_match)?;
    let subject = read_subject(&text)?;
    let tool = match (&text.tool, &subject) {
        (Some(tool), _) => tool.clone(),
        (None, RuleSubject::Command(_)) => "execute".to_owned(),
        (None, _) => return Err(fault("the rule names no tool", "add tool = \"…\", or a command")),
    };
    if tool.len() > TOKEN_LEN_MAX {
        return Err(fault("the name of the tool is too long", "use a shorter pattern"));
    }
    let rule = CallRule {
        decision: text.decision,
        tool: WordPattern::parse(&tool).map_err(|error| (error, "mend the pattern".to_owned()))?,
        tool_shown: tool,
        subject,
        why: text.why,
        place,
    };
    for example in &text.matches {
        if !rule.fits_example(example, Fit::Certain) {
            return Err(no_match(example));
        }
    }
    for example in &text.not_match {
        if rule.fits_example(example, Fit::Possible) {
            return Err(unwanted_match(example));
        }
    }
    Ok(rule)
}

fn read_subject(text: &RuleText) -> Result<RuleSubject, Fault> {
    match (&text.command, &text.path) {
        (Some(_), Some(_)) => {
            Err(fault("a rule is about a command or about a path, not both", "make two rules of it"))
        }
        (Some(command), None) => {
            let rule = read_command_rule(command, text.into.as_deref(), text.then.as_deref(), &text.except)?;
            let has_second = rule.into.is_some() || rule.then.is_some();
            if text.decision == RuleDecision::Allow && has_second {
                return Err(fault("a rule that allows is about one command", "remove into and then"));
            }
            Ok(RuleSubject::Command(rule))
        }
        (None, _) if text.into.is_some() || text.then.is_some() || !text.except.is_empty() => {
            Err(fault("into, then and except need a command", "add command = [\"…\"]"))
        }
        (None, Some(path)) if path.len() > TOKEN_LEN_MAX => {
            Err(fault("the path is too long", "use a shorter glob"))
        }
        (None, Some(path)) => PathPattern::parse(path)
            .map(RuleSubject::Path)
            .map_err(|error| (error, "write a glob such as /work/**/*.sql".to_owned())),
        (None, None) => Ok(RuleSubject::Call),
    }
}

fn read_risk(text: RiskText) -> Result<RiskRule, Fault> {
    check_why(&text.why)?;
    check_examples(&text.matches, &text.not_match)?;
    let command = read_command_rule(&text.command, text.into.as_deref(), text.then.as_deref(), &text.except)?;
    let is_risk = |example: &String| {
        let line = read_command(example);
        (0..line.calls.len()).any(|index| command.is_risk(&line, index))
    };
    if let Some(example) = text.matches.iter().find(|example| !is_risk(example)) {
        return Err(no_match(example));
    }
    if let Some(example) = text.not_match.iter().find(|example| is_risk(example)) {
        return Err(unwanted_match(example));
    }
    let level = match text.level {
        RiskLevel::Outside => CallRisk::Outside,
        RiskLevel::Untrusted => CallRisk::Untrusted,
    };
    Ok(RiskRule { level, command, why: text.why })
}

fn read_command_rule(
    command: &[String],
    into: Option<&[String]>,
    then: Option<&[String]>,
    except: &[Vec<String>],
) -> Result<CommandRule, Fault> {
    let read = |tokens: &[String]| {
        let is_long = tokens.len() > TOKENS_MAX || tokens.iter().any(|token| token.len() > TOKEN_LEN_MAX);
        if is_long {
            let limit = format!("a pattern has at most {TOKENS_MAX} words of {TOKEN_LEN_MAX} bytes");
            return Err((limit, "use ** for the rest of the words".to_owned()));
        }
        let mend = "write the words as a list: [\"git\", \"push\", \"**\"]";
        CommandPattern::parse(tokens).map_err(|error| (error, mend.to_owned()))
    };
    if except.len() > TOKENS_MAX {
        let limit = format!("a rule has at most {TOKENS_MAX} exceptions");
        return Err((limit, "join exceptions with * and {a,b}".to_owned()));
    }
    Ok(CommandRule {
        command: read(command)?,
        into: into.map(read).transpose()?,
        then: then.map(read).transpose()?,
        except: except.iter().map(|tokens| read(tokens)).collect::<Result<_, _>>()?,
    })
}

impl CallRule {
    /// Whether the rule holds for an example: a command, a path, or the name of a tool.
    fn fits_example(&self, example: &str, least: Fit) -> bool {
        match &self.subject {
            RuleSubject::Call => self.tool.matches(example),
            RuleSubject::Path(pattern) => pattern.matches(&super::normalize_path("/", example)),
            RuleSubject::Command(rule) => {
                let line = read_command(example);
                match self.decision {
                    RuleDecision::Allow => {
                        let is_known = line.unknown.is_empty() && !line.calls.is_empty();
                        is_known && (0..line.calls.len()).all(|index| self.allows(&line, index))
                    }
                    RuleDecision::Ask | RuleDecision::Deny => rule.fit_line(&line) >= least,
                }
            }
        }
    }
}

fn check_why(why: &str) -> Result<(), Fault> {
    if why.trim().is_empty() {
        return Err(fault("the rule has no reason", "add why = \"…\""));
    }
    if why.chars().count() > WHY_LEN_MAX {
        let limit = format!("the reason is longer than {WHY_LEN_MAX} characters");
        return Err((limit, "make it shorter".to_owned()));
    }
    Ok(())
}

fn check_examples(matches: &[String], not_match: &[String]) -> Result<(), Fault> {
    let is_long = |example: &String| example.len() > EXAMPLE_LEN_MAX;
    let too_many = matches.len() > EXAMPLES_MAX || not_match.len() > EXAMPLES_MAX;
    if too_many || matches.iter().chain(not_match).any(is_long) {
        let limit = format!("a rule has at most {EXAMPLES_MAX} examples of {EXAMPLE_LEN_MAX} bytes");
        return Err((limit, "remove some".to_owned()));
    }
    Ok(())
}

fn fault(fault: &str, mend: &str) -> Fault {
    (fault.to_owned(), mend.to_owned())
}

fn no_match(example: &str) -> Fault {
    let fault = format!("the rule does not match its example {example:?}");
    (fault, "change the pattern, or remove the example from match".to_owned())
}

fn unwanted_match(example: &str) -> Fault {
    let fault = format!("the rule matches {example:?}, which it must not");
    (fault, "make the pattern narrower, or remove the example from not_match".to_owned())
}
