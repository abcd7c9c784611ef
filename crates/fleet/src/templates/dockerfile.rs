//! Parses a Dockerfile into the steps of a build.
//!
//! Supported are FROM, RUN, COPY, ENV, WORKDIR, USER and ARG. Instructions that change no file (LABEL, CMD,
//! ENTRYPOINT, EXPOSE, …) are ignored with a note. Every other instruction is an error that names its line, so no
//! build is silently incomplete.
//! Trust: the text comes from a repository. It only becomes steps of a build, which run in Bodies.

use std::collections::BTreeMap;

use proto::{Failure, Kind};

use super::Instruction;

/// Instructions that configure a container and have no meaning for a Body.
const LEFT_OUT: &[&str] =
    &["LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"];
const HINT: &str = "a line is FROM, RUN, COPY, ENV, WORKDIR, USER or ARG with its arguments";

/// A parsed Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// The base image.
    pub from: String,
    /// The instructions after FROM; the archives of COPY do not exist yet.
    pub acts: Vec<Instruction>,
    /// Notes about ignored instructions.
    pub notes: Vec<String>,
}

/// Parses a Dockerfile. `arguments` override the defaults of ARG; `target` is the name of the wanted stage.
pub fn read(
    text: &str,
    arguments: &BTreeMap<String, String>,
    target: Option<&str>,
) -> Result<Dockerfile, Failure> {
    let mut reader = DockerfileParser {
        arguments,
        known: BTreeMap::new(),
        args: Vec::new(),
        from: None,
        stage: None,
        acts: Vec::new(),
        notes: Vec::new(),
    };
    for (number, line) in joined(text)? {
        reader
            .line(&line)
            .map_err(|why| Failure::new(Kind::Usage, format!("line {number}: {why}")).hint(HINT))?;
    }
    let nothing =
        || Failure::new(Kind::Usage, "the file has no FROM instruction").hint("begin it with: FROM base");
    let from = reader.from.ok_or_else(nothing)?;
    if let Some(target) = target.filter(|target| reader.stage.as_deref() != Some(*target)) {
        return Err(Failure::new(
            Kind::Usage,
            format!("the file has no stage {:?}", proto::text::visible(target)),
        ));
    }
    Ok(Dockerfile { from, acts: reader.acts, notes: reader.notes })
}

/// Joins continued lines and drops comments; each result has the number of its first line.
fn joined(text: &str) -> Result<Vec<(usize, String)>, Failure> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (index, line) in text.lines().enumerate() {
        let plain = line.trim();
        if plain
            .strip_prefix('#')
            .is_some_and(|rest| rest.trim_start().to_ascii_lowercase().starts_with("escape=`"))
        {
            return Err(Failure::new(
                Kind::Usage,
                "unsupported `# escape=` directive (only `\\` is supported)",
            )
            .hint(HINT));
        }
        if plain.starts_with('#') || (plain.is_empty() && !goes_on) {
            continue;
        }
        let (part, more) = plain.strip_suffix('\\').map_or((plain, false), |part| (part, true));
        match lines.last_mut().filter(|_| goes_on) {
            Some((_, whole)) => {
                whole.push(' ');
                whole.push_str(part);
            }
            None => lines.push((index + 1, part.to_owned())),
        }
        goes_on = more;
    }
    Ok(lines)
}

struct DockerfileParser<'a> {
    arguments: &'a BTreeMap<String, String>,
    /// The values of ARG and ENV so far.
    known: BTreeMap<String, String>,
    /// The names of the ARGs that commands see.
    args: Vec<String>,
    from: Option<String>,
    stage: Option<String>,
    acts: Vec<Instruction>,
    notes: Vec<String>,
}

impl DockerfileParser<'_> {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let (verb, rest) = line
            .split_once(char::is_whitespace)
            .map(|(verb, rest)| (verb, rest.trim()))
            .ok_or("it has no arguments")?;
        let verb = verb.to_ascii_uppercase();
        if self.from.is_none() && verb != "FROM" && verb != "ARG" {
            return Err("only ARG is allowed before FROM".into());
        }
        match verb.as_str() {
            "FROM" => self.from(rest),
            "ARG" => self.arg(rest),
            "ENV" => self.env(rest),
            "RUN" => self.run(rest),
            "COPY" => self.copy(rest),
            "WORKDIR" => self.path_of(rest).map(|path| self.acts.push(Instruction::Workdir(path))),
            "USER" => self.path_of(rest).map(|name| self.acts.push(Instruction::User(name))),
            verb if LEFT_OUT.contains(&verb) => {
                self.notes
                    .push(format!("{verb} is ignored: a Body runs the commands that its caller starts"));
                Ok(())
            }
            verb => Err(format!("{} is not supported", proto::text::visible(verb))),
        }
    }

    fn from(&mut self, rest: &str) -> Result<(), String> {
        if self.from.is_some() {
            return Err("a second FROM: multi-stage builds are not supported".into());
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        match words[..] {
            [image] if !image.starts_with("--") => self.from = Some(self.filled(image)?),
            [image, word, stage] if !image.starts_with("--") && word.eq_ignore_ascii_case("as") => {
                self.from = Some(self.filled(image)?);
                self.stage = Some(stage.to_owned());
            }
            _ => return Err("FROM has an image, perhaps AS a name, and no options".into()),
        }
        // ARGs before FROM apply to FROM only.
        self.known.clear();
        self.args.clear();
        Ok(())
    }

    fn arg(&mut self, rest: &str) -> Result<(), String> {
        for (name, value) in pairs_or_names(rest)? {
            let default = value.map(|value| self.filled(&value)).transpose()?;
            let Some(value) = self.arguments.get(&name).cloned().or(default) else { continue };
            // ENV takes precedence over ARG.
            if self.known.contains_key(&name) && !self.args.contains(&name) {
                continue;
            }
            self.known.insert(name.clone(), value);
            self.args.retain(|other| *other != name);
            self.args.push(name);
        }
        Ok(())
    }

    fn env(&mut self, rest: &str) -> Result<(), String> {
        let first = rest.split_whitespace().next().unwrap_or_default();
        let pairs = match rest.split_once(char::is_whitespace) {
            Some((name, value)) if !first.contains('=') => {
                vec![(name.to_owned(), Some(value.trim().to_owned()))]
            }
            _ => pairs_or_names(rest)?,
        };
        for (name, value) in pairs {
            let value = value.ok_or("ENV has a name and a value")?;
            // Variables that only the image defines are expanded when the step runs.
            let value = fill(&value, &self.known, |name| Ok(format!("${{{name}}}")))?;
            self.args.retain(|other| *other != name);
            self.known.insert(name.clone(), value.clone());
            self.acts.push(Instruction::Env(vec![(name, value)]));
        }
        Ok(())
    }

    fn run(&mut self, rest: &str) -> Result<(), String> {
        if rest.starts_with("--") {
            return Err("RUN with options is not supported".into());
        }
        if rest.contains("<<")
            && rest
                .split("<<")
                .nth(1)
                .is_some_and(|end| end.starts_with(|c: char| c.is_ascii_alphabetic() || "-'\"".contains(c)))
        {
            return Err("RUN with a here-document is not supported: write it as one line".into());
        }
        let command = match words_of_list(rest)? {
            Some(words) => words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "),
            None => rest.to_owned(),
        };
        let args: Vec<String> = self
            .args
            .iter()
            .map(|name| format!("{name}={}", quoted(self.known.get(name).map_or("", String::as_str))))
            .collect();
        let command = if args.is_empty() { command } else { format!("export {}; {command}", args.join(" ")) };
        self.acts.push(Instruction::Run { command, user: None });
        Ok(())
    }

    fn copy(&mut self, rest: &str) -> Result<(), String> {
        let (mut owner, mut mode, mut rest) = (None, None, rest);
        while let Some(option) = rest.strip_prefix("--") {
            let (option, after) = option.split_once(char::is_whitespace).ok_or("COPY has no source")?;
            match option.split_once('=') {
                Some(("chown", value)) => owner = Some(self.filled(value)?),
                Some(("chmod", value)) => mode = Some(self.filled(value)?),
                _ => return Err(format!("COPY --{} is not supported", proto::text::visible(option))),
            }
            rest = after.trim();
        }
        let words = match words_of_list(rest)? {
            Some(words) => words,
            None => rest.split_whitespace().map(str::to_owned).collect(),
        };
        let words = words.iter().map(|word| self.filled(word)).collect::<Result<Vec<_>, _>>()?;
        let Some((target, sources)) = words.split_last().filter(|(_, sources)| !sources.is_empty()) else {
            return Err("COPY has a source and a target".into());
        };
        if sources.len() > 1 && !target.ends_with('/') {
            return Err("COPY of several sources has a target that ends with `/`".into());
        }
        for source in sources {
            let (source, target) = (source.trim_start_matches('/').to_owned(), target.clone());
            let source = if source.is_empty() { ".".to_owned() } else { source };
            self.acts.push(Instruction::Copy {
                source,
                target,
                owner: owner.clone(),
                mode: mode.clone(),
                hash: String::new(),
                archive: Default::default(),
            });
        }
        Ok(())
    }

    fn path_of(&self, rest: &str) -> Result<String, String> {
        self.filled(rest.trim_matches('"'))
    }

    /// Expands the variables of ARG and ENV in a text.
    fn filled(&self, text: &str) -> Result<String, String> {
        fill(text, &self.known, |name| {
            Err(format!("it names ${}, which neither ARG nor ENV before it sets", proto::text::visible(name)))
        })
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Parses a list such as `["a", "b"]`; `None` if the text is not a list.
fn words_of_list(text: &str) -> Result<Option<Vec<String>>, String> {
    if !text.starts_with('[') {
        return Ok(None);
    }
    serde_json::from_str(text)
        .map(Some)
        .or_else(|_| if text.contains('"') { Err("its JSON list is malformed".into()) } else { Ok(None) })
}

/// Parses `NAME=value OTHER="a b"`, or names without values.
fn pairs_or_names(text: &str) -> Result<Vec<(String, Option<String>)>, String> {
    let mut pairs = Vec::new();
    for word in words(text)? {
        let (name, value) = word
            .split_once('=')
            .map_or((word.as_str(), None), |(name, value)| (name, Some(value.to_owned())));
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err(format!("{:?} is not a variable name", proto::text::visible(name)));
        }
        pairs.push((name.to_owned(), value));
    }
    Ok(pairs)
}

/// Splits a text into words as a shell does, and removes quotes.
fn words(text: &str) -> Result<Vec<String>, String> {
    let mut words: Vec<String> = Vec::new();
    let (mut word, mut inside, mut quote) = (String::new(), false, None);
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (c, quote) {
            ('\\', Some('"') | None) => word.extend(rest.next()),
            (c, Some(open)) if c == open => quote = None,
            (_, Some(_)) => word.push(c),
            ('"' | '\'', None) => quote = Some(c),
            (c, None) if c.is_whitespace() => {
                if inside {
                    words.push(std::mem::take(&mut word));
                }
                inside = false;
                continue;
            }
            _ => word.push(c),
        }
        inside = true;
    }
    if quote.is_some() {
        return Err("a quote is not closed".into());
    }
    if inside {
        words.push(word);
    }
    Ok(words)
}

/// Expands `$NAME`, `${NAME}`, `${NAME:-else}` and `${NAME:+then}`.
fn fill(
    text: &str,
    known: &BTreeMap<String, String>,
    unknown: impl Fn(&str) -> Result<String, String>,
) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let (inner, after) = match rest.strip_prefix('{') {
            Some(braced) => braced.split_once('}').ok_or("a brace is not closed")?,
            None => rest
                .split_at(rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len())),
        };
        if inner.is_empty() {
            out.push('$');
            continue;
        }
        let (name, other) = inner.split_once(':').map_or((inner, None), |(name, other)| (name, Some(other)));
        let value = known.get(name).filter(|value| other.is_none() || !value.is_empty());
        match (value, other.map(|other| other.split_at_checked(1).unwrap_or((other, "")))) {
            (Some(_), Some(("+", then))) => out.push_str(then),
            (None, Some(("+", _))) => {}
            (None, Some(("-", instead))) => out.push_str(instead),
            (_, Some((sign, _))) if sign != "-" => {
                return Err(format!("${{{}}} is not supported", proto::text::visible(inner)));
            }
            (Some(value), _) => out.push_str(value),
            (None, _) => out.push_str(&unknown(name)?),
        }
        rest = after;
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> Result<Dockerfile, Failure> {
        read(text, &BTreeMap::new(), None)
    }

    fn copy(source: &str, target: &str) -> Instruction {
        Instruction::Copy {
            source: source.into(),
            target: target.into(),
            owner: None,
            mode: None,
            hash: String::new(),
            archive: Default::default(),
        }
    }

    fn run(command: &str) -> Instruction {
        Instruction::Run { command: command.into(), user: None }
    }

    #[test]
    fn lines_become_steps() {
        let read = plain("# what\nFROM base\nENV A=\"b c\" D=e\nENV OLD a b\nWORKDIR /app\nCOPY . /app\nRUN one && \\\n  # between\n  two\nRUN [\"a\", \"it's\"]\nUSER root\nCMD [\"x\"]\n").unwrap();
        let env = |name: &str, value: &str| Instruction::Env(vec![(name.into(), value.into())]);
        let acts = [
            env("A", "b c"),
            env("D", "e"),
            env("OLD", "a b"),
            Instruction::Workdir("/app".into()),
            copy(".", "/app"),
            run("one &&  two"),
            run(r"'a' 'it'\''s'"),
            Instruction::User("root".into()),
        ];
        assert_eq!((read.from.as_str(), read.acts), ("base", acts.to_vec()));
        assert_eq!(read.notes, ["CMD is ignored: a Body runs the commands that its caller starts"]);
    }

    #[test]
    fn arguments_take_the_place_of_defaults() {
        let arguments = BTreeMap::from([("V".to_owned(), "13".to_owned())]);
        let text = "ARG V=12\nFROM debian:${V} AS dev\nARG V=11\nARG W=x\nENV P=$V-${W:-y}-$PATH\nCOPY --chown=1000:5 --chmod=755 a b /to/\nRUN echo $V\n";
        let read = read(text, &arguments, Some("dev")).unwrap();
        assert_eq!(read.from, "debian:13");
        assert_eq!(read.acts[0], Instruction::Env(vec![("P".into(), "13-x-${PATH}".into())]));
        let Instruction::Copy { source, target, owner, mode, .. } = &read.acts[2] else {
            panic!("{:?}", read.acts)
        };
        assert_eq!(
            (source.as_str(), target.as_str(), owner.as_deref(), mode.as_deref()),
            ("b", "/to/", Some("1000:5"), Some("755"))
        );
        assert_eq!(read.acts[3], run("export V='13' W='x'; echo $V"));
    }

    #[test]
    fn what_is_not_done_is_refused_by_its_line() {
        for (bad, says) in [
            ("", "FROM"),
            ("RUN x", "line 1"),
            ("FROM a\nFROM b", "line 2: a second FROM"),
            ("FROM a\nADD x y", "line 2: ADD is not supported"),
            ("FROM a\nCOPY x", "line 2"),
            ("FROM a\nENV A", "line 2"),
            ("FROM a\nCOPY --from=b a b", "COPY --from=b is not supported"),
            ("FROM a\nRUN --mount=type=cache x", "line 2"),
            ("FROM a\nRUN <<EOF", "line 2"),
            ("FROM --platform=x a", "line 1"),
            ("FROM a\nCOPY a b c", "ends with `/`"),
            ("FROM a\n\nWORKDIR $NO", "line 3: it names $NO"),
            ("FROM a\nSHELL [\"x\"]", "SHELL is not supported"),
            ("FROM $X", "line 1"),
            ("FROM a\nENV A=\"x", "quote"),
        ] {
            let said = plain(bad).unwrap_err().to_string();
            assert!(said.contains(says), "{bad:?}: {said}");
        }
        assert!(read("FROM a AS x", &BTreeMap::new(), Some("y")).is_err());
    }
}
