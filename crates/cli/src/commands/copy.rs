//! `pal cp`.

use std::{ffi::OsStr, path::PathBuf};

use fleet::{CopyTotals, Fleet, GitDirs, OmittedEntries};
use proto::{BodyName, Failure, Kind, Size};

use crate::{
    args::CopyArgs,
    failure,
    output::{self, Format},
    progress,
    session::{StopSignals, stopped_code},
    settings::absolute,
};

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum CopySide {
    Host(PathBuf),
    Body { key: String, path: String },
}

/// The direction of a copy.
pub enum CopyDirection {
    /// Into a Body.
    In { host: PathBuf, key: String, path: String },
    /// Out of a Body.
    Out { key: String, path: String, host: PathBuf },
}

/// Finds out which side is in a Body.
pub fn parse_direction(args: &CopyArgs) -> Result<CopyDirection, Failure> {
    match (side(&args.source)?, side(&args.target)?) {
        (CopySide::Host(host), CopySide::Body { key, path }) => {
            Ok(CopyDirection::In { host: absolute(&host)?, key, path })
        }
        (CopySide::Body { key, path }, CopySide::Host(host)) => {
            Ok(CopyDirection::Out { key, path, host: absolute(&host)? })
        }
        (CopySide::Host(_), CopySide::Host(_)) => {
            Err(usage("neither side is in a Body").hint("write a path in a Body as BODY:PATH"))
        }
        (CopySide::Body { .. }, CopySide::Body { .. }) => {
            Err(usage("both sides are in Bodies").hint("copy to the host first, then into the other Body"))
        }
    }
}

/// Copies files. A signal ends the copy, and removes what is partial.
pub async fn copy(fleet: &Fleet, way: CopyDirection, git: GitDirs, format: Format) -> Result<u8, Failure> {
    let mut signals = StopSignals::listen()?;
    let copied = tokio::select! {
        copied = progress::watch("copying", copy_files(fleet, way, git)) => copied?,
        signal = signals.next() => return Ok(stopped_code(signal)),
    };
    match format {
        Format::Json => output::json(&copied)?,
        Format::Text => {
            let entries = if copied.entries == 1 { "entry" } else { "entries" };
            output::talk(&format!("copied {} {entries}, {}", copied.entries, Size(copied.bytes)));
        }
    }
    if let Some(warning) = omitted_warning(&copied.omitted).filter(|_| format == Format::Text) {
        failure::warn(&warning, format);
    }
    Ok(0)
}

async fn copy_files(fleet: &Fleet, way: CopyDirection, git: GitDirs) -> Result<CopyTotals, Failure> {
    match way {
        CopyDirection::In { host, key, path } => {
            let view = fleet.find(&key)?;
            fleet.files().copy_in(view.id(), &host, &path).await
        }
        CopyDirection::Out { key, path, host } => {
            let view = fleet.find(&key)?;
            fleet.files().copy_out_with(view.id(), &path, &host, git).await
        }
    }
}

/// Refuses `--with-git` for a copy into a Body, and warns of it for a copy out of one.
pub fn check_git(args: &CopyArgs, way: &CopyDirection, format: Format) -> Result<GitDirs, Failure> {
    match (args.with_git, way) {
        (false, _) => Ok(GitDirs::LeaveOut),
        (true, CopyDirection::In { .. }) => Err(usage("--with-git is about copies out of a Body")
            .hint("leave it out: git directories always go in")),
        (true, CopyDirection::Out { host, .. }) => {
            let warning = usage("git directories of a Body can run programs on this host")
                .because("git runs the hooks, filters, pagers and fsmonitors that their settings name")
                .hint(format!(
                    "before git runs below {}, read .git/config and .git/hooks there",
                    host.display()
                ));
            failure::warn(&warning, format);
            Ok(GitDirs::Copy)
        }
    }
}

fn omitted_warning(omitted: &OmittedEntries) -> Option<Failure> {
    if omitted.count == 0 {
        return None;
    }
    let entries =
        if omitted.count == 1 { "1 entry was".to_owned() } else { format!("{} entries were", omitted.count) };
    let mut names: Vec<String> =
        omitted.first.iter().map(|entry| format!("{} ({})", entry.path, entry.kind)).collect();
    let more = omitted.count.saturating_sub(names.len() as u64);
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    let warning = usage(&format!("{entries} left out: {}", names.join(", ")));
    Some(match omitted.git_count {
        0 => warning,
        _ => warning.hint(
            "bring commits out with `pal land` or `pal save`; `pal cp --with-git` copies git directories",
        ),
    })
}

fn usage(message: &str) -> Failure {
    Failure::new(Kind::Usage, message)
}

/// Parses `BODY:PATH` if the part before the first colon can be an id or a name; else a path of the host.
fn side(text: &OsStr) -> Result<CopySide, Failure> {
    let bytes = text.as_encoded_bytes();
    if bytes.is_empty() {
        return Err(usage("a path is empty").hint("write `.` for the current directory"));
    }
    let colon = bytes.iter().position(|byte| *byte == b':');
    let key = colon
        .and_then(|at| std::str::from_utf8(&bytes[..at]).ok())
        .filter(|key| key.parse::<BodyName>().is_ok());
    let Some(key) = key else { return Ok(CopySide::Host(PathBuf::from(text))) };
    match std::str::from_utf8(&bytes[key.len() + 1..]) {
        Ok("") => {
            Err(usage(&format!("no path in body {key} is named")).hint(format!("write one: {key}:/tmp")))
        }
        Ok(path) => Ok(CopySide::Body { key: key.to_owned(), path: path.to_owned() }),
        Err(_) => Err(usage("a path in a Body is not valid UTF-8")
            .hint("copy its directory instead: names inside it may have any bytes")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_side_with_an_id_before_a_colon_is_in_a_body() {
        let body = |key: &str, path: &str| CopySide::Body { key: key.into(), path: path.into() };
        for (text, expected) in [
            ("k3v9:/tmp", body("k3v9", "/tmp")),
            ("k3v9:a:b", body("k3v9", "a:b")),
            ("fix-login:/tmp", body("fix-login", "/tmp")),
            ("-x:/tmp", CopySide::Host("-x:/tmp".into())),
            ("/tmp/x", CopySide::Host("/tmp/x".into())),
            ("./k3v9:x", CopySide::Host("./k3v9:x".into())),
            ("K:x", CopySide::Host("K:x".into())),
            (":x", CopySide::Host(":x".into())),
        ] {
            assert_eq!(side(OsStr::new(text)).unwrap(), expected, "{text}");
        }
        assert_eq!(
            side(OsStr::from_bytes(b"\xff:x")).unwrap(),
            CopySide::Host(OsStr::from_bytes(b"\xff:x").into())
        );
        for bad in [&b""[..], b"k3v9:", b"k3v9:\xff"] {
            assert_eq!(side(OsStr::from_bytes(bad)).unwrap_err().kind, Kind::Usage);
        }
    }
}
