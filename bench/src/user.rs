//! Runs the bench as an ordinary user.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

/// Runs this bench again as another user, from copies that this user can read; true if it succeeds.
pub fn again_as(user: u32) -> io::Result<bool> {
    let me = std::env::current_exe()?;
    let home = PathBuf::from(format!("/var/tmp/palisade-bench-of-{user}-{}", std::process::id()));
    fs::create_dir(&home)?;
    let ran = copy_and_run(&me, &home, user);
    fs::remove_dir_all(&home)?;
    ran
}

fn copy_and_run(me: &Path, home: &Path, user: u32) -> io::Result<bool> {
    for name in ["bench", "pal"] {
        fs::copy(me.with_file_name(name), home.join(name))?;
        fs::set_permissions(home.join(name), fs::Permissions::from_mode(0o755))?;
    }
    let own = home.join("home");
    fs::create_dir(&own)?;
    chown(&own, Some(user), Some(user))?;
    let (words, written) = translate(std::env::args().skip(1), &own);
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={user}")).arg(format!("--regid={user}")).args(["--clear-groups", "--"]);
    let status = command.arg(home.join("bench")).args(words).current_dir(&own).env("HOME", &own).status()?;
    for (from, to) in written.iter().filter(|(from, _)| from.exists()) {
        fs::copy(from, to)?;
    }
    Ok(status.success())
}

/// The arguments without `--as-user`; output files go to a directory of that user, and are copied later.
fn translate(words: impl Iterator<Item = String>, own: &Path) -> (Vec<String>, Vec<(PathBuf, PathBuf)>) {
    let mut words = words;
    let (mut same, mut written) = (Vec::new(), Vec::new());
    while let Some(word) = words.next() {
        match word.as_str() {
            "--as-user" => drop(words.next()),
            "--save" | "--json" => {
                let there = own.join(word.trim_start_matches('-'));
                written.extend(words.next().map(|to| (there.clone(), PathBuf::from(to))));
                same.extend([word, there.to_string_lossy().into_owned()]);
            }
            _ => same.push(word),
        }
    }
    (same, written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_user_and_the_files_change() {
        let words = ["--quick", "--as-user", "1000", "--save", "x.md", "--only", "run"].map(str::to_owned);
        let (same, written) = translate(words.into_iter(), Path::new("/h"));
        assert_eq!(same, ["--quick", "--save", "/h/save", "--only", "run"]);
        assert_eq!(written, [(PathBuf::from("/h/save"), PathBuf::from("x.md"))]);
    }
}
