//! Two `pal` processes at once.

use std::process::Child;

use crate::{cli_test, pal::said};

cli_test! {
    fn commands_in_one_body_at_once_do_not_mix(pal) {
        let body = pal.ok("create");
        let start = |n: u32| pal.command(["exec", &body, "--", "sh", "-c", &format!("echo {n}; exit {n}")]).spawn().unwrap();
        let children: Vec<Child> = (1..=8).map(start).collect();
        for (child, n) in children.into_iter().zip(1..) {
            let said = said(child.wait_with_output().unwrap());
            assert_eq!((said.code, said.out), (n, format!("{n}\n")), "{}", said.talk);
        }
    }
}

cli_test! {
    fn of_several_removes_one_succeeds(pal) {
        let body = pal.ok("create");
        let children: Vec<Child> = (0..4).map(|_| pal.command(["rm", "--force", &body]).spawn().unwrap()).collect();
        let all: Vec<_> = children.into_iter().map(|child| said(child.wait_with_output().unwrap())).collect();
        assert_eq!(all.iter().filter(|said| said.code == 0).count(), 1, "{all:?}");
        assert!(all.iter().all(|said| [0, 121, 122].contains(&said.code)), "{all:?}");
        pal.nothing_left(&[body]);
    }
}

cli_test! {
    fn a_first_use_by_several_makes_one_data_directory(pal) {
        let children: Vec<Child> = (0..6).map(|n| pal.command(["run", "--", "sh", "-c", &format!("exit {n}")]).spawn().unwrap()).collect();
        for (child, n) in children.into_iter().zip(0..) {
            let said = said(child.wait_with_output().unwrap());
            assert_eq!((said.code, said.talk.as_str()), (n, ""));
        }
        pal.nothing_left(&[]);
        let kinds = pal.ok("events").lines().count();
        assert_eq!(kinds % 6, 0, "six whole lives are in the log, not {kinds} lines");
    }
}

cli_test! {
    fn stop_and_remove_and_exec_at_once_end_in_order(pal) {
        for _ in 0..3 {
            let body = pal.ok("create");
            let lines: [&[&str]; 4] = [&["stop", &body], &["rm", "--force", &body], &["exec", &body, "--", "true"], &["pause", &body]];
            let children: Vec<Child> = lines.into_iter().map(|line| pal.command(line).spawn().unwrap()).collect();
            for child in children {
                let said = said(child.wait_with_output().unwrap());
                assert!([0, 121, 122, 125, 137, 143].contains(&said.code), "{said:?}");
                assert!(!said.talk.contains("panicked"), "{said:?}");
            }
            let _ = pal.run(["rm", "--force", &body]);
            pal.nothing_left(&[body]);
        }
    }
}
