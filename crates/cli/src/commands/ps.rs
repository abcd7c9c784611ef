//! `pal ps`.

use fleet::Fleet;
use proto::{Failure, Size, guest::BodyProcess};

use super::choose;
use crate::{
    age,
    output::{self, Format},
    table::Table,
};

/// Lists the processes in a Body.
pub async fn ps(fleet: &Fleet, key: Option<&str>, format: Format) -> Result<(), Failure> {
    let view = choose::body(fleet, key)?;
    let list = fleet.access().processes(view.id()).await?;
    if list.left_out > 0 {
        output::talk(&format!("{} more processes are not shown", list.left_out));
    }
    match format {
        Format::Json => output::json_lines(&list.processes),
        Format::Text => output::data(table(&list.processes).render("").as_bytes()),
    }
}

fn table(processes: &[BodyProcess]) -> Table {
    let mut table = Table::new(&["PID", "USER", "CPU", "MEMORY", "AGE", "COMMAND"]);
    for process in processes {
        table.row([
            &process.pid.to_string(),
            &process.user,
            &cpu_time(process.cpu_ms),
            &Size(process.memory_bytes).to_string(),
            &age::short(process.age_ms / 1000),
            &process.command.join(" "),
        ]);
    }
    table
}

/// CPU time as `ps` writes it: minutes and seconds, with hundredths.
fn cpu_time(ms: u64) -> String {
    format!("{}:{:02}.{:02}", ms / 60_000, ms / 1000 % 60, ms / 10 % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_one_line_and_cannot_write_another() {
        let process = BodyProcess {
            pid: 7,
            parent: 1,
            user: "user".into(),
            cpu_ms: 61_234,
            memory_bytes: 3 << 20,
            age_ms: 125_000,
            command: vec!["sh".into(), "-c".into(), "a\nb\x1b[2J".into()],
        };
        assert_eq!(
            table(&[process]).render(""),
            "PID  USER  CPU      MEMORY  AGE  COMMAND\n7    user  1:01.23  3MiB    2m   sh -c a\\nb\\u{1b}[2J\n"
        );
    }
}
