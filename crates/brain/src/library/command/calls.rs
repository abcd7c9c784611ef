//! The walk through the tree of the grammar: collects the calls of programs and who reads whose output.

use rable::{Node, NodeKind};

use super::{
    ProgramCall, ShellLine, Word,
    substitution::{Quotes, find_substitutions},
    word::read_word,
    wrapper::{WrappedCommand, find_inner, without_global_options},
};

/// The most programs of one text.
const CALLS_MAX: usize = 512;
/// The most words of all programs of one text.
const WORDS_MAX: usize = 32_768;
/// The deepest nesting of texts in texts: `sh -c "sh -c …"`.
const TEXTS_MAX: usize = 8;
/// The deepest nesting of substitutions that the grammar leaves as text.
const SUBSTITUTIONS_MAX: usize = 100;
/// The most reasons that are kept.
const UNKNOWN_MAX: usize = 8;

/// Collects the calls of one text and of the texts in it.
#[derive(Default)]
pub(super) struct CallWalk {
    line: ShellLine,
    words: usize,
    texts: usize,
    substitutions: usize,
    /// Shells that read their script from an input that is not in the text.
    fed: Vec<usize>,
}

impl CallWalk {
    pub(super) fn into_line(mut self) -> ShellLine {
        let is_read = |index: &usize| self.line.calls.iter().any(|call| call.into.contains(index));
        if self.fed.iter().any(is_read) {
            self.note_unknown("a shell reads its script from a pipe");
        }
        self.line
    }

    /// Reads a text and returns its calls.
    pub(super) fn read_text(&mut self, text: &str) -> Vec<usize> {
        if self.texts >= TEXTS_MAX {
            self.note_unknown("texts are nested too deeply");
            return Vec::new();
        }
        self.texts += 1;
        let calls = self.parse(text);
        self.texts -= 1;
        calls
    }

    /// Reads a command that is substituted.
    fn read_substitution(&mut self, text: &str) -> Vec<usize> {
        if self.substitutions >= SUBSTITUTIONS_MAX {
            self.note_unknown("substitutions are nested too deeply");
            return Vec::new();
        }
        self.substitutions += 1;
        let calls = self.parse(text);
        self.substitutions -= 1;
        calls
    }

    fn parse(&mut self, text: &str) -> Vec<usize> {
        match rable::parse(text, false) {
            Ok(nodes) => self.visit_all(&nodes),
            Err(error) => {
                self.note_unknown(&format!("the text cannot be parsed: {error}"));
                Vec::new()
            }
        }
    }

    fn note_unknown(&mut self, why: &str) {
        if self.line.unknown.len() < UNKNOWN_MAX && !self.line.unknown.iter().any(|known| known == why) {
            self.line.unknown.push(why.chars().take(200).collect());
        }
    }

    fn visit_all<'a>(&mut self, nodes: impl IntoIterator<Item = &'a Node>) -> Vec<usize> {
        nodes.into_iter().flat_map(|node| self.visit(node)).collect()
    }

    /// Walks one node and returns the calls in it.
    fn visit(&mut self, node: &Node) -> Vec<usize> {
        match &node.kind {
            NodeKind::Command { assignments, words, redirects } => {
                self.visit_command(assignments, words, redirects)
            }
            NodeKind::Pipeline { commands, .. } => self.visit_pipeline(commands),
            NodeKind::List { items } => self.visit_all(items.iter().map(|item| &item.command)),
            NodeKind::If { condition, then_body, else_body, redirects } => {
                let parts = [condition, then_body].into_iter().chain(else_body);
                self.visit_all(parts.map(|part| &**part).chain(redirects))
            }
            NodeKind::While { condition, body, redirects }
            | NodeKind::Until { condition, body, redirects } => {
                self.visit_all([&**condition, &**body].into_iter().chain(redirects))
            }
            NodeKind::For { words, body, redirects, .. }
            | NodeKind::Select { words, body, redirects, .. } => {
                self.visit_all(words.iter().flatten().chain([&**body]).chain(redirects))
            }
            NodeKind::ForArith { init, cond, incr, body, redirects } => {
                let mut calls = self.visit_raw(&[init.as_str(), cond, incr].join(" "), Quotes::Show);
                calls.extend(self.visit_all([&**body].into_iter().chain(redirects)));
                calls
            }
            NodeKind::Case { word, patterns, redirects } => {
                let patterns = patterns.iter().flat_map(|case| case.patterns.iter().chain(&case.body));
                self.visit_all([&**word].into_iter().chain(patterns).chain(redirects))
            }
            NodeKind::Subshell { body, redirects }
            | NodeKind::BraceGroup { body, redirects }
            | NodeKind::ConditionalExpr { body, redirects } => {
                self.visit_all([&**body].into_iter().chain(redirects))
            }
            NodeKind::ArithmeticCommand { raw_content, redirects, .. } => {
                let mut calls = self.visit_raw(raw_content, Quotes::Show);
                calls.extend(self.visit_all(redirects));
                calls
            }
            _ => self.visit_small(node),
        }
    }

    /// Walks a node that holds one other node, or text.
    fn visit_small(&mut self, node: &Node) -> Vec<usize> {
        match &node.kind {
            NodeKind::Function { body, .. } => self.visit(body),
            NodeKind::Coproc { command, .. } => self.visit(command),
            NodeKind::Negation { pipeline } | NodeKind::Time { pipeline, .. } => self.visit(pipeline),
            NodeKind::CommandSubstitution { command, .. } | NodeKind::ProcessSubstitution { command, .. } => {
                self.visit(command)
            }
            NodeKind::Redirect { target, .. } => self.visit(target),
            NodeKind::HereDoc { content, quoted: false, .. } => self.visit_raw(content, Quotes::Show),
            NodeKind::UnaryTest { operand, .. } | NodeKind::CondNot { operand } => self.visit(operand),
            NodeKind::CondParen { inner } => self.visit(inner),
            NodeKind::BinaryTest { left, right, .. }
            | NodeKind::CondAnd { left, right }
            | NodeKind::CondOr { left, right } => self.visit_all([&**left, &**right]),
            NodeKind::CondTerm { value, .. } => self.visit_raw(value, Quotes::Hide),
            NodeKind::Word { value, parts, .. } => self.visit_word(value, parts),
            NodeKind::Array { elements } => self.visit_all(elements),
            _ => Vec::new(),
        }
    }

    /// Walks the substitutions of a word, also those that the grammar leaves as text: it stops at the third level, and
    /// does not remove backslashes between backticks.
    fn visit_word(&mut self, word: &str, parts: &[Node]) -> Vec<usize> {
        if word.contains('`') {
            return self.visit_raw(word, Quotes::Hide);
        }
        let mut calls = Vec::new();
        for part in parts {
            calls.extend(match &part.kind {
                NodeKind::WordLiteral { value } => self.visit_raw(value, Quotes::Hide),
                NodeKind::ParamExpansion { param, arg, .. } | NodeKind::ParamIndirect { param, arg, .. } => {
                    let text = [param.as_str(), arg.as_deref().unwrap_or_default()].join(" ");
                    self.visit_raw(&text, Quotes::Show)
                }
                NodeKind::ParamLength { param: text }
                | NodeKind::BraceExpansion { content: text }
                | NodeKind::ArithDeprecated { expression: text } => self.visit_raw(text, Quotes::Show),
                NodeKind::ArithmeticExpansion { .. } => self.visit_raw(word, Quotes::Show),
                _ => self.visit(part),
            });
        }
        calls
    }

    /// Finds substitutions in a text that is not a command.
    fn visit_raw(&mut self, text: &str, quotes: Quotes) -> Vec<usize> {
        match find_substitutions(text, quotes) {
            Ok(inner) => inner.iter().flat_map(|text| self.read_substitution(text)).collect(),
            Err(why) => {
                self.note_unknown(why);
                Vec::new()
            }
        }
    }

    /// Every program of a stage is read by those of the stages after it.
    fn visit_pipeline(&mut self, commands: &[Node]) -> Vec<usize> {
        let stages: Vec<Vec<usize>> = commands.iter().map(|command| self.visit(command)).collect();
        for pair in stages.windows(2) {
            self.connect(&pair[0], &pair[1]);
        }
        stages.concat()
    }

    fn connect(&mut self, from: &[usize], to: &[usize]) {
        for index in from {
            if let Some(call) = self.line.calls.get_mut(*index) {
                call.into.extend(to);
                call.into.sort_unstable();
                call.into.dedup();
            }
        }
    }

    fn visit_command(&mut self, assignments: &[Node], words: &[Node], redirects: &[Node]) -> Vec<usize> {
        let mut inside = self.visit_all(assignments);
        for node in words.iter().chain(redirects) {
            inside.extend(self.visit(node));
        }
        let words: Vec<Word> = words.iter().map(read_word).collect();
        if words.is_empty() {
            return inside;
        }
        let own = self.add_call(words, &given_input(redirects));
        self.connect(&inside, &own);
        [inside, own].concat()
    }

    /// Adds a call and the calls that it makes.
    fn add_call(&mut self, words: Vec<Word>, input: &[Word]) -> Vec<usize> {
        self.words += words.len();
        if self.line.calls.len() >= CALLS_MAX || self.words > WORDS_MAX {
            self.note_unknown("the text starts too many programs");
            return Vec::new();
        }
        let index = self.line.calls.len();
        let plain = without_global_options(&words);
        let inner = find_inner(&words);
        if words.first().is_some_and(|word| word.to_program().as_exact().is_none()) {
            self.note_unknown("the name of a program is computed");
        }
        self.line.calls.push(ProgramCall { words, plain, into: Vec::new() });
        let mut calls = vec![index];
        for inner in inner {
            match inner {
                WrappedCommand::Words(words) => calls.extend(self.add_call(words, input)),
                WrappedCommand::Script(word) => calls.extend(self.read_script(&word)),
                WrappedCommand::Input if input.is_empty() => self.fed.push(index),
                WrappedCommand::Input => {
                    for script in input {
                        calls.extend(self.read_script(script));
                    }
                }
                WrappedCommand::Unknown(why) => self.note_unknown(why),
            }
        }
        calls
    }

    fn read_script(&mut self, word: &Word) -> Vec<usize> {
        match word.as_exact() {
            Some(text) => self.read_text(text),
            None => {
                self.note_unknown("a script is computed");
                Vec::new()
            }
        }
    }
}

/// The input of a command that its own text gives: here-documents and here-strings.
fn given_input(redirects: &[Node]) -> Vec<Word> {
    let scripts = redirects.iter().filter_map(|redirect| match &redirect.kind {
        NodeKind::HereDoc { content, .. } => Some(Word::exact(content.clone())),
        NodeKind::Redirect { op, target, .. } if op == "<<<" => Some(read_word(target)),
        _ => None,
    });
    scripts.collect()
}
