//! Commands, as rules see them: one line for each program, `…` for a computed part.

use proptest::prelude::*;

use super::*;

/// The programs of a text: words joined by spaces, programs by `; `, and a `?` if more may start.
fn show(text: &str) -> String {
    let line = read_command(text);
    let word = |word: &Word| match word.extent {
        WordExtent::Exact => word.head.clone(),
        WordExtent::One => format!("{}…{}", word.head, word.tail),
        WordExtent::Several => format!("{}……{}", word.head, word.tail),
    };
    let call = |call: &ProgramCall| call.words.iter().map(word).collect::<Vec<_>>().join(" ");
    let calls: Vec<String> = line.calls.iter().map(call).collect();
    let unknown = if line.unknown.is_empty() { "" } else { " ?" };
    format!("{}{unknown}", calls.join("; "))
}

fn check(text: &str, expected: &str) {
    assert_eq!(show(text), expected, "{text}");
}

#[test]
fn every_simple_command_is_found() {
    check("a b | c && d || e; f & g\nh", "a b; c; d; e; f; g; h");
    check("(a; { b; }) > f", "a; b");
    check("if a; then b; elif c; then d; else e; fi", "a; b; c; d; e");
    check("while a; do b; done; until c; do d; done", "a; b; c; d");
    check("for x in 1 $(a); do b $x; done", "a; b ……");
    check("case $(a) in x) b;; *) c;; esac", "a; b; c");
    check("f() { a; }; function g { b; }; f", "a; b; f");
    check("! a | b; time c; coproc d", "a; b; c; d");
    check("[[ -n $(a) && x == $(b) ]] && ((x + $(c)))", "a; b; c");
    check("A=$(a) B=1 c", "a; c");
    check("x=1", "");
    check("", "");
    check("# only a comment", "");
}

#[test]
fn substitutions_are_found_everywhere() {
    check("a $(b \"`c`\")", "c; b …; a ……");
    check("a <(b) >(c) 2> >(d)", "b; c; d; a … …");
    check("a \"${x:-$(b)}\" ${y/$(c)/} $((1 + $(d)))", "b; c; d; a … …… ……");
    check("cat <<E\n$(a) `b` \\$(c)\nE\n", "a; b; cat");
    check("cat <<'E'\n$(a)\nE\n", "cat");
    check("cat <<< \"$(a)\"", "a; cat");
    check("arr=(1 $(a)); b", "a; b");
    check("a {1,$(b)}", "b; a ……");
    check("a $((b c); d) $( (e) )", "b c; d; e; a …… ……");
    check("a $(b $(c $(d $(e \"$(f '$(g)')\"))))", "f $(g); e …; d ……; c ……; b ……; a ……");
    check("a `b \\`c \\\\\\`d\\\\\\`\\`` '`e`' \"\\`f\"", "d; c ……; b ……; a …… `e` `f");
}

#[test]
fn quotes_are_removed_and_computed_parts_are_kept_apart() {
    check("g\"i\"t pu\\sh 'a b'", "git push a b");
    check("$'g\\x69t' \"a\\\"b\\$c\\x\"", "git a\"b$c\\x");
    check("\"$HOME\"/bin/git a", "…/bin/git a");
    check("a b$x \"c$y\" \"$@\" d* ~/e ~", "a b…… c… …… d…… …/e …");
    check("a$(b)c", "b; a……c ?");
    check("$X a", "…… a ?");
}

#[test]
fn programs_that_start_programs_are_followed() {
    check("sh -c 'a; b'", "sh -c a; b; a; b");
    check("bash -euo pipefail -c 'a'", "bash -euo pipefail -c a; a");
    check("bash -lc a x", "bash -lc a x; a");
    check("bash -c \"$X\"", "bash -c … ?");
    check("bash x.sh -c a", "bash x.sh -c a");
    check("bash <<E\na\nE\n", "bash; a");
    check("sh <<< 'a b'", "sh; a b");
    check("echo x | sh", "echo x; sh ?");
    check("sh < file", "sh");
    check("env -i A=1 -u B a b", "env -i A=1 -u B a b; -u B a b");
    check("env A=1 B=$x a", "env A=1 B=…… a; a");
    check("env -S 'a b'", "env -S a b ?");
    check("sudo -u me -E A=1 a b", "sudo -u me -E A=1 a b; a b");
    check(
        "nice -n 5 timeout -k 1 5 nohup a",
        "nice -n 5 timeout -k 1 5 nohup a; timeout -k 1 5 nohup a; nohup a; a",
    );
    check("a | xargs -n 1 b c", "a; xargs -n 1 b c; b c ……");
    check("a | xargs -I{} b x{} c", "a; xargs -I{} b x{} c; b x… c");
    check("a | xargs", "a; xargs");
    check("xargs", "xargs");
    check(
        "find . -exec a {} \\; -o -execdir sh -c 'b' +",
        "find . -exec a {} ; -o -execdir sh -c b +; a …; sh -c b; b",
    );
    check("eval 'a' b; eval \"$X\"", "eval a b; a b; eval … ?");
    check("trap 'a' EXIT; trap - INT; alias x='b c'", "trap a EXIT; a; trap - INT; alias x=b c; b c");
    check("su me -c 'a b'; watch -n 1 a b", "su me -c a b; a b; watch -n 1 a b; a b");
    check("python3.12 -u -m pip install x", "python3.12 -u -m pip install x; pip install x");
    check("uv run --with x a b; bundle exec c", "uv run --with x a b; x a b; bundle exec c; c");
    check("parallel a ::: b c", "parallel a ::: b c; a ……");
    check("source x; . <(a)", "source x; a; . … ?");
    check("exec a; command b; builtin c", "exec a; a; command b; b; builtin c; c");
}

#[test]
fn options_before_a_subcommand_are_dropped_in_the_plain_form() {
    let plain = |text: &str| {
        let line = read_command(text);
        let words = line.calls[0].plain.clone()?;
        Some(words.iter().map(|word| word.head.clone()).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(plain("git -C a -c b=c --no-pager push x").as_deref(), Some("git push x"));
    assert_eq!(plain("cargo +nightly --config a=b publish").as_deref(), Some("cargo publish"));
    assert_eq!(plain("git push"), None);
    assert_eq!(plain("git --version"), None);
    assert_eq!(plain("ls -l a"), None);
}

#[test]
fn readers_of_an_output_are_known() {
    let readers = |text: &str| {
        let line = read_command(text);
        let first = line.calls.iter().position(|call| call.words[0].head == "a").unwrap();
        let mut names: Vec<String> =
            line.readers(first).iter().map(|index| line.calls[*index].words[0].head.clone()).collect();
        names.sort();
        names.join(" ")
    };
    assert_eq!(readers("a | b | c; d"), "b c");
    assert_eq!(readers("a; b"), "");
    assert_eq!(readers("b $(a)"), "b");
    assert_eq!(readers("b <(a) | c"), "b c");
    assert_eq!(readers("{ a; x; } | (b; c)"), "b c");
    assert_eq!(readers("a | sudo sh"), "sh sudo");
}

#[test]
fn texts_that_are_no_commands_are_unknown() {
    for text in ["if", "a $(", "'", "a | | b", "f() {", "((", "case x in"] {
        assert!(!read_command(text).unknown.is_empty(), "{text}");
    }
    let nested = (0..9).fold("a".to_owned(), |text, _| format!("eval {}", shell_quote(&text)));
    let line = read_command(&nested);
    assert!(line.unknown.iter().any(|why| why.contains("nested")), "{:?}", line.unknown);
}

fn shell_quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

proptest! {
    /// A program that is quoted in any way, inside any construct, is found with its words.
    #[test]
    fn a_command_cannot_hide(
        word in "[a-z'\"$ \\\\;|&()*?~{},#!`\\-]{1,8}",
        layers in prop::collection::vec(0..9_usize, 0..5),
    ) {
        let mut text = format!("git push {}", shell_quote(&word));
        for layer in layers {
            text = match layer {
                0 => format!("sh -c {}", shell_quote(&text)),
                1 => format!("( {text} )"),
                2 => format!("x=$( {text} )"),
                3 => format!("if true; then {text}; fi"),
                4 => format!("true && {text} | cat"),
                5 => format!("eval {}", shell_quote(&text)),
                6 => format!("f() {{ {text}; }}; f"),
                7 => format!("for i in 1 2; do {text}; done"),
                _ => format!("echo \"$( {text} )\""),
            };
        }
        let line = read_command(&text);
        let wanted = [Word::exact("git"), Word::exact("push"), Word::exact(word.as_str())];
        let found = line.calls.iter().any(|call| call.words == wanted);
        prop_assert!(found || !line.unknown.is_empty(), "{} {:?}", text, line);
        // Five layers of text in text are within the limits, so nothing is unknown.
        prop_assert!(found, "{} {:?}", text, line);
    }

    /// Any text is read without a panic, and words that were quoted come out as they went in.
    #[test]
    fn any_text_is_read(text in "\\PC{0,40}", odd in "[a $(){}\\[\\]`'\"\\\\|&;<>\\n=!#*?~-]{0,40}") {
        read_command(&text);
        read_command(&odd);
        let quoted = read_command(&format!("x {}", shell_quote(&text)));
        prop_assert_eq!(&quoted.calls[0].words[1], &Word::exact(text.as_str()));
    }
}
