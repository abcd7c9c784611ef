//! Terminals, with `script`, which gives `pal` a real one.

use std::{
    io::Write,
    process::{Child, Command, Stdio},
};

use crate::{
    cli_test,
    pal::{Pal, await_word},
};

/// A shell script on a terminal of its own; `$PAL` is `pal`. It reads piped input.
pub fn terminal(pal: &Pal, lines: &str) -> Child {
    let file = pal.dir().join("lines");
    std::fs::write(&file, lines).unwrap();
    let mut command = Command::new("script");
    command
        .args(["--quiet", "--return", "--command"])
        .arg(format!("bash {}", file.display()))
        .arg("/dev/null");
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", pal.dir())
        .env("PAL_DATA", pal.data())
        .env("PAL", crate::pal::program());
    command.env("TERM", "xterm").env("SHELL", "/bin/sh").env("DIR", pal.dir());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script (bsdutils) can be run")
}

/// Runs it to its end, without keyboard input.
fn on_a_terminal(pal: &Pal, lines: &str) -> (Option<i32>, String) {
    let mut child = terminal(pal, lines);
    let keyboard = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    drop(keyboard);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

cli_test! {
    fn a_command_on_a_terminal_has_one(pal) {
        let (code, text) = on_a_terminal(pal, "stty rows 33 cols 99; \"$PAL\" run -it -- sh -c 'tty; stty size; test -t 0 && test -t 1 && exit 7'");
        assert_eq!((code, text.as_str()), (Some(7), "/dev/pts/0\r\n33 99\r\n"));
        let (code, text) = on_a_terminal(pal, "\"$PAL\" run -- sh -c 'test -t 1 && echo terminal || echo pipe'");
        assert!(code == Some(0) && (text.contains("pipe") || text.contains("terminal")), "{text}");
    }
}

cli_test! {
    fn the_terminal_is_as_it_was_afterwards(pal) {
        let lines = r#"
            stty -g > "$DIR/before"
            "$PAL" run -it -- sh -c 'stty raw -echo; exit 3'; echo "code $?"
            stty -g > "$DIR/after"
            "$PAL" run -it -- no-such-command >/dev/null 2>&1; echo "code $?"
            stty -g > "$DIR/after-failure"
        "#;
        let (_, text) = on_a_terminal(pal, lines);
        assert!(text.contains("code 3") && text.contains("code 127"), "{text}");
        let read = |name: &str| std::fs::read_to_string(pal.dir().join(name)).unwrap();
        assert_eq!(read("after"), read("before"));
        assert_eq!(read("after-failure"), read("before"));
    }
}

cli_test! {
    fn the_terminal_is_restored_also_after_kill_9(pal) {
        let lines = r#"
            stty -g > "$DIR/before"
            terminal=$(tty)
            (
                # Only once the terminal is raw.
                for i in $(seq 500); do [ "$(stty -g < $terminal)" != "$(cat "$DIR/before")" ] && break; sleep 0.02; done
                stty -g < $terminal > "$DIR/raw"
                kill -9 $(cat "$DIR/pid")
            ) &
            sh -c 'echo $$ > "$DIR/pid"; exec "$PAL" run -it -- sleep 1000' 2>/dev/null
            for i in $(seq 250); do [ "$(stty -g)" = "$(cat "$DIR/before")" ] && break; sleep 0.02; done
            stty -g > "$DIR/after"
            wait
        "#;
        on_a_terminal(pal, lines);
        let read = |name: &str| std::fs::read_to_string(pal.dir().join(name)).unwrap();
        assert_ne!(read("raw"), read("before"), "it was raw when it was killed");
        assert_eq!(read("after"), read("before"));
        pal.nothing_left(&[]);
    }
}

cli_test! {
    fn control_c_reaches_the_command_and_not_pal(pal) {
        let lines = r#""$PAL" run -it -- sh -c 'trap "echo caught; exit 4" INT; echo ready; while :; do sleep 0.02; done'; echo "code $?""#;
        let mut child = terminal(pal, lines);
        await_word(&mut child, "ready");
        child.stdin.as_mut().unwrap().write_all(&[3]).unwrap();
        let text = await_word(&mut child, "code 4");
        assert!(text.contains("caught"), "{text:?}");
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}

cli_test! {
    fn what_is_typed_is_read_and_a_new_size_is_heard_of(pal) {
        let lines = r#"stty rows 20 cols 70; "$PAL" run -it -- sh -c 'trap "stty size; exit 0" WINCH; read line; echo "read $line"; while :; do sleep 0.02; done' & sleep 0; fg; "#;
        let lines = format!("set -m\n(for i in $(seq 500); do [ -e $DIR/read ] && break; sleep 0.02; done; stty rows 41 cols 91 < $(tty < /dev/tty)) &\n{lines}");
        let mut child = terminal(pal, &lines);
        child.stdin.as_mut().unwrap().write_all(b"typed words\r").unwrap();
        await_word(&mut child, "read typed words");
        std::fs::write(pal.dir().join("read"), "").unwrap();
        await_word(&mut child, "41 91");
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
