//! A build's steps as a file has them, and the files it copies as an archive.

use std::{
    fs::{self, File},
    io,
    path::{Component, Path},
};

use fleet::Act;
use proto::{Failure, Kind, event::hex};
use sha2::{Digest, Sha256};

/// Reads lines as a Dockerfile has them: what to begin with, and the steps.
pub fn read(text: &str) -> Result<(String, Vec<Act>), Failure> {
    let mut from = None;
    let mut acts = Vec::new();
    let joined = text.replace("\\\n", " ");
    for (number, line) in joined.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        let wrong = |why: &str| {
            Failure::new(Kind::Usage, format!("line {}: {why}", number + 1)).hint("a line is FROM, RUN, COPY, ENV, WORKDIR or USER with its arguments")
        };
        let (verb, rest) = line.split_once(char::is_whitespace).map(|(verb, rest)| (verb, rest.trim())).ok_or_else(|| wrong("it has no arguments"))?;
        let act = match verb.to_ascii_uppercase().as_str() {
            "FROM" if from.is_none() && acts.is_empty() => {
                from = Some(rest.to_owned());
                continue;
            }
            "RUN" => Act::Run { command: rest.to_owned(), user: None },
            "COPY" => match rest.split_whitespace().collect::<Vec<_>>()[..] {
                [source, target] if !source.starts_with("--") => Act::Copy {
                    source: source.to_owned(),
                    target: target.to_owned(),
                    owner: None,
                    mode: None,
                    hash: String::new(),
                    archive: Default::default(),
                },
                _ => return Err(wrong("COPY has one source and one target, and no options")),
            },
            "ENV" => match rest.split_once('=').or_else(|| rest.split_once(char::is_whitespace)) {
                Some((name, value)) => Act::Env(vec![(name.trim().to_owned(), value.trim().trim_matches('"').to_owned())]),
                None => return Err(wrong("ENV has a name and a value")),
            },
            "WORKDIR" => Act::Workdir(rest.to_owned()),
            "USER" => Act::User(rest.to_owned()),
            _ => return Err(wrong("this step is not known, or stands in the wrong place")),
        };
        acts.push(act);
    }
    let from = from.ok_or_else(|| Failure::new(Kind::Usage, "the file does not say FROM what to begin").hint("begin it with: FROM base"))?;
    Ok((from, acts))
}

/// Packs what a COPY names, and names the archive by its contents.
pub fn pack(act: Act, context: &Path, to: &Path) -> Result<Act, Failure> {
    let Act::Copy { source, target, owner, mode, .. } = act else { return Ok(act) };
    let cannot = |error: io::Error| Failure::new(Kind::NotFound, format!("cannot copy {source}")).because(error).hint("name what is below the file's own directory");
    let climbs = Path::new(&source).components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir));
    if climbs {
        return Err(cannot(io::Error::other("it is not below it")));
    }
    fs::create_dir_all(to).map_err(cannot)?;
    let part = to.join(format!("part{}", std::process::id()));
    let packed = write(context, Path::new(&source), &part).and_then(|()| digest(&part));
    let hash = packed.inspect_err(|_| drop(fs::remove_file(&part))).map_err(cannot)?;
    let archive = to.join(format!("{hash}.tar"));
    fs::rename(&part, &archive).map_err(cannot)?;
    Ok(Act::Copy { source, target, owner, mode, hash, archive })
}

fn write(context: &Path, source: &Path, to: &Path) -> io::Result<()> {
    let mut builder = tar::Builder::new(io::BufWriter::new(File::create(to)?));
    builder.follow_symlinks(false);
    // The same files are the same archive, whenever they were written.
    builder.mode(tar::HeaderMode::Deterministic);
    let place = context.join(source);
    let name: std::path::PathBuf = source.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    match fs::symlink_metadata(&place)?.is_dir() {
        true if name.as_os_str().is_empty() => builder.append_dir_all(".", &place)?,
        true => builder.append_dir_all(&name, &place)?,
        false => builder.append_path_with_name(&place, &name)?,
    }
    io::Write::flush(&mut builder.into_inner()?)
}

fn digest(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut Feed(&mut hasher))?;
    Ok(hex(&hasher.finalize()))
}

struct Feed<'a>(&'a mut Sha256);

impl io::Write for Feed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_steps() {
        let (from, acts) = read("# what\nFROM base\nENV A=b c\nWORKDIR /app\nCOPY . /app\nRUN one && \\\n  two\nUSER root\n").unwrap();
        assert_eq!(from, "base");
        assert_eq!(acts.len(), 5);
        assert_eq!(acts[0], Act::Env(vec![("A".into(), "b c".into())]));
        assert!(matches!(&acts[3], Act::Run { command, .. } if command.starts_with("one &&") && command.ends_with("two")));
        for bad in ["", "RUN x", "FROM a\nFROM b", "FROM a\nADD x y", "FROM a\nCOPY x", "FROM a\nENV", "FROM a\nCOPY --chown=u a b"] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_not_below_the_file_is_not_copied() {
        for source in ["../x", "/etc/passwd", "a/../../x"] {
            let act = Act::Copy { source: source.into(), target: "x".into(), owner: None, mode: None, hash: String::new(), archive: Default::default() };
            assert!(pack(act, Path::new("."), Path::new("/nonexistent")).is_err(), "{source}");
        }
    }
}
