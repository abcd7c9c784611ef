//! The same bench as an ordinary user.

use std::{fs, io, os::unix::fs::PermissionsExt, path::Path, process::Command};

/// Runs this bench again as another user, from copies that this user can reach; true when that one is content.
pub fn again_as(user: u32) -> io::Result<bool> {
    let me = std::env::current_exe()?;
    let home = format!("/var/tmp/palisade-bench-of-{user}-{}", std::process::id());
    let home = Path::new(&home);
    fs::create_dir(home)?;
    let ran = copy_and_run(&me, home, user);
    fs::remove_dir_all(home)?;
    ran
}

fn copy_and_run(me: &Path, home: &Path, user: u32) -> io::Result<bool> {
    for name in ["bench", "pal"] {
        fs::copy(me.with_file_name(name), home.join(name))?;
        fs::set_permissions(home.join(name), fs::Permissions::from_mode(0o755))?;
    }
    let own = home.join("home");
    fs::create_dir(&own)?;
    std::os::unix::fs::chown(&own, Some(user), Some(user))?;
    let mut words = std::env::args().skip(1).filter(|word| !word.is_empty());
    let mut status = Command::new("setpriv");
    status.arg(format!("--reuid={user}")).arg(format!("--regid={user}")).args(["--clear-groups", "--"]).arg(home.join("bench"));
    while let Some(word) = words.next() {
        match word.as_str() {
            "--as-user" => drop(words.next()),
            // What is written, is written where that user may.
            _ => drop(status.arg(word)),
        }
    }
    Ok(status.current_dir(&own).env("HOME", &own).status()?.success())
}
