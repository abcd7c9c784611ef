//! The output of a Body's work on a terminal: no byte of a Body takes effect there.

use std::process::Command;

use testkit::{Bodies, body_test};

use crate::repo::{HostRepo, pal_command};

/// The output of `pal` on a terminal.
fn shown(t: &Bodies, args: &[&str]) -> Vec<u8> {
    let quoted: Vec<String> = pal_command(t, args)
        .iter()
        .map(|word| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''")))
        .collect();
    let output = Command::new("script")
        .args(["-qec", &quoted.join(" "), "/dev/null"])
        .stdin(std::process::Stdio::null())
        .output()
        .expect("script can be run");
    output.stdout
}

/// Removes the escape sequences of `pal` itself: colours and the progress bar.
fn without_ours(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let mut left = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find("\u{1b}[") {
        left.push_str(&rest[..at]);
        let tail = &rest[at + 2..];
        let len = tail.find(|c: char| c.is_ascii_alphabetic()).map_or(tail.len(), |len| len + 1);
        let ours = matches!(tail[..len].chars().last(), Some('m' | 'K'))
            && tail[..len - 1].chars().all(|c| c.is_ascii_digit() || c == ';');
        if !ours {
            left.push_str(&rest[at..at + 2 + len]);
        }
        rest = &tail[len..];
    }
    left + rest
}

#[body_test(except(user = "what it shows does not depend on who runs it"))]
async fn nothing_a_body_wrote_acts_on_a_terminal(t: Bodies) {
    let host = HostRepo::plain(&t);
    let evil = "e\\033]52;c;eA==\\007\\033[2J\\302\\233\\342\\200\\256\\342\\201\\246x";
    let mut bodies = Vec::new();
    for number in 1..3 {
        let body = host.body(&t).await;
        let work = format!(
            "evil=$(printf '{evil}'); echo \"$evil\" > \"$evil\"; mkdir -p .vscode; echo {number} > \".vscode/$evil\"; git add -A; git -c user.name=\"$evil\" commit -qm \"$evil {number}\"; echo \"$evil\" >> numbers; mkdir \"inner$evil\"; git init -q \"inner$evil\""
        );
        t.sh(&body, &work).await.ok();
        bodies.push(body.to_string());
    }
    let (one, two) = (bodies[0].as_str(), bodies[1].as_str());
    // A control: the bytes are there, and are written unchanged if the output is no terminal.
    let mut command = pal_command(&t, &["diff", one]).into_iter();
    let raw = Command::new(command.next().unwrap()).args(command).output().unwrap().stdout;
    assert!(raw.windows(4).any(|bytes| bytes == b"\x1b[2J"), "{}", String::from_utf8_lossy(&raw));
    let verbs: [&[&str]; 10] = [
        &["diff", one],
        &["diff", "--stat", one],
        &["diff", "--json", one],
        &["log", one],
        &["log", "--json", one],
        &["save", one],
        &["compare", one, two],
        &["compare", "--json", one, two],
        &["land", "--patch", one],
        &["land", "--branch", "landed", one],
    ];
    for verb in verbs {
        let seen = without_ours(&shown(&t, verb));
        assert!(!seen.trim().is_empty(), "{verb:?} says something");
        let bad = |c: char| {
            (c.is_control() && !matches!(c, '\n' | '\r' | '\t'))
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        };
        assert!(!seen.contains(bad), "{verb:?}: {seen:?}");
    }
    for body in &bodies {
        t.fleet().remove_with(&body.parse().unwrap(), fleet::Force::Yes, fleet::Discard::Yes).await.unwrap();
    }
}
