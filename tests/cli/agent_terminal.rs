//! `pal agent` on a terminal: the view, keys, approvals, interrupts.

use std::{io::Write, process::Child};

use crate::{
    agent::{AgentTest, text},
    cli_test,
    pal::{Pal, await_word},
    terminal::terminal,
};

const ASKS: &str = "
[[turns]]
calls = [{ tool = 'execute', arguments = { command = 'echo really' } }]
[[turns]]
text = 'The end.'
";

/// `pal` in the repository, on a terminal of 100 columns.
fn on_terminal(test: &AgentTest<'_>, pal: &Pal, line: &str) -> Child {
    let place = test.repository.display();
    terminal(
        pal,
        &format!(
            "stty rows 30 cols 100; cd {place}; \"$PAL\" {line}; echo \"code $?\"; stty -a | grep -o ' -*echo ' "
        ),
    )
}

fn press(child: &mut Child, keys: &[u8]) {
    child.stdin.as_mut().unwrap().write_all(keys).unwrap();
}

/// Reads to the end, which says that the terminal shows keys again.
fn end(mut child: Child, code: &str) -> String {
    let mut text = await_word(&mut child, code);
    text.push_str(&await_word(&mut child, " echo"));
    drop(child.stdin.take());
    child.wait().unwrap();
    text
}

cli_test! {
    fn the_view_shows_the_work_and_no_escape_sequence_of_the_model(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ntext = \"Evil \\u001b]0;title\\u0007 \\u001b[2J text\"\n\
             calls = [{ tool = 'execute', arguments = { command = \"printf '\\\\033[2Jboo'\" } }]\n\
             [[turns]]\ntext = 'The end.'\n",
        );
        let text = end(on_terminal(&test, pal, &format!("agent run --model {model} work")), "code 0");
        assert!(text.contains("Evil \\u{1b}]0;title\\u{7} \\u{1b}[2J text"), "{text:?}");
        assert!(text.contains("The end.") && text.contains("finished"), "{text:?}");
        assert!(!text.contains("\u{1b}]") && !text.contains("\u{1b}[2J"), "{text:?}");
        assert!(text.contains("\u{1b}[32m✓"), "there are colours: {text:?}");
        test.clear();
    }
}

cli_test! {
    fn no_color_is_kept(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model("[[turns]]\ntext = 'The end.'\n");
        let place = test.repository.display();
        let child = terminal(pal, &format!("cd {place}; NO_COLOR=1 \"$PAL\" agent run --model {model} work; echo \"code $?\"; stty -a | grep -o ' -*echo '"));
        let text = end(child, "code 0");
        assert!(text.contains("✓ finished") && !text.contains("m✓"), "{text:?}");
        test.clear();
    }
}

cli_test! {
    fn keys_decide_about_a_call(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(ASKS);
        for (keys, outcome) in [("y", "done"), ("a", "done"), ("nnot now\r", "denied"), ("isome words\r", "answered")] {
            let mut child = on_terminal(&test, pal, &format!("agent run --approve ask --model {model} work"));
            let shown = await_word(&mut child, "decide later");
            assert!(shown.contains("command: echo really") && shown.contains("because of"), "{shown:?}");
            // A key without a meaning decides nothing.
            press(&mut child, b"x");
            await_word(&mut child, "decide later");
            press(&mut child, &keys.as_bytes()[..1]);
            if keys.len() > 1 {
                await_word(&mut child, ": ");
                press(&mut child, &keys.as_bytes()[1..]);
            }
            end(child, "code 0");
            let id = text(&test.newest()["spec"]["id"]);
            let ended = test.await_event(&id, "call.ended");
            assert_eq!(ended["data"]["outcome"], outcome, "{keys}: {ended}");
            test.settled(&id);
        }
        test.clear();
    }
}

cli_test! {
    fn a_person_can_decide_later_and_in_an_editor(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(ASKS);
        let mut child = on_terminal(&test, pal, &format!("agent run --approve ask --model {model} work"));
        await_word(&mut child, "decide later");
        press(&mut child, b"q");
        let shown = end(child, "code 3");
        assert!(shown.contains("pal agent approve"), "{shown:?}");
        let id = text(&test.newest()["spec"]["id"]);
        let editor = pal.dir().join("editor");
        std::fs::write(&editor, "#!/bin/sh\nsed -i s/really/edited/ \"$1\"\n").unwrap();
        let place = test.repository.display();
        let lines = format!("cd {place}; EDITOR='sh {}' \"$PAL\" agent attach {id}; echo \"code $?\"; stty -a | grep -o ' -*echo '", editor.display());
        let mut child = terminal(pal, &lines);
        await_word(&mut child, "decide later");
        press(&mut child, b"e");
        end(child, "code 0");
        assert_eq!(test.await_event(&id, "call.started")["data"]["arguments"]["command"], "echo edited");
        test.settled(&id);
        test.clear();
    }
}

cli_test! {
    fn a_question_is_answered_at_the_prompt(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'ask_user', arguments = { question = 'Which colour?' } }]\n\
             [[turns]]\nexpect = ['deep blue']\ntext = 'The end.'\n",
        );
        let mut child = on_terminal(&test, pal, &format!("agent run --model {model} paint"));
        let shown = await_word(&mut child, "your answer: ");
        assert!(shown.contains("Which colour?"), "{shown:?}");
        press(&mut child, b"deep blue\r");
        end(child, "code 0");
        test.settled(&text(&test.newest()["spec"]["id"]));
        test.clear();
    }
}

cli_test! {
    fn one_interrupt_stops_the_turn_and_a_message_goes_on(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'sleep 1000' } }]\n\
             [[turns]]\nexpect = ['other way']\ntext = 'The end.'\n",
        );
        let mut child = on_terminal(&test, pal, &format!("agent run --model {model} work"));
        await_word(&mut child, "sleep 1000");
        press(&mut child, &[3]);
        await_word(&mut child, "a message to go on with");
        press(&mut child, b"try the other way\r");
        end(child, "code 0");
        test.settled(&text(&test.newest()["spec"]["id"]));
        test.clear();
    }
}

cli_test! {
    fn two_interrupts_or_the_key_d_stop_watching(pal) {
        let test = AgentTest::new(pal, &[("a", "1\n")]);
        let model = test.model(
            "[[turns]]\ncalls = [{ tool = 'execute', arguments = { command = 'sleep 1000' } }]\n[[turns]]\ntext = 'The end.'\n",
        );
        let mut child = on_terminal(&test, pal, &format!("agent run --model {model} work"));
        await_word(&mut child, "sleep 1000");
        press(&mut child, b"d");
        let shown = end(child, "code 0");
        assert!(shown.contains("goes on by itself"), "{shown:?}");
        let id = text(&test.newest()["spec"]["id"]);
        assert_eq!(test.show(&id)["state"]["status"], "working");
        let mut child = on_terminal(&test, pal, &format!("agent attach {id}"));
        await_word(&mut child, "sleep 1000");
        press(&mut child, &[3]);
        await_word(&mut child, "interrupt");
        press(&mut child, &[3]);
        end(child, "code 130");
        assert_eq!(test.settled(&id)["state"]["reason"], "interrupted");
        test.clear();
    }
}
