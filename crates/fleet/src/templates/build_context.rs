//! The context of a build: archives the files that its COPY steps name.

use std::{
    fs::{self, File},
    io,
    path::{Component, Path},
};

use proto::{Failure, Kind, event::hex};
use sha2::{Digest, Sha256};

use super::Instruction;

/// Archives the source of a COPY below the directory `to`, and replaces the source by the archive's content id. Leaves
/// other instructions as they are. The `context` is the directory that holds the Dockerfile.
pub fn pack_context(act: Instruction, context: &Path, to: &Path) -> Result<Instruction, Failure> {
    let Instruction::Copy { source, target, owner, mode, .. } = act else { return Ok(act) };
    let cannot = |error: io::Error| {
        Failure::new(Kind::NotFound, format!("cannot copy {source}"))
            .because(error)
            .hint("name a path below the Dockerfile's own directory")
    };
    let climbs =
        Path::new(&source).components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir));
    if climbs {
        return Err(cannot(io::Error::other("it is outside of the Dockerfile's directory")));
    }
    fs::create_dir_all(to).map_err(cannot)?;
    let drawn = sys::random::bytes::<8>().map_err(cannot)?;
    let part = to.join(format!("part-{}", hex(&drawn)));
    let packed = write(context, Path::new(&source), &part).and_then(|()| digest(&part));
    let hash = packed.inspect_err(|_| drop(fs::remove_file(&part))).map_err(cannot)?;
    let archive = to.join(format!("{hash}.tar"));
    fs::rename(&part, &archive).map_err(cannot)?;
    Ok(Instruction::Copy { source, target, owner, mode, hash, archive })
}

fn write(context: &Path, source: &Path, to: &Path) -> io::Result<()> {
    let mut builder = tar::Builder::new(io::BufWriter::new(File::create(to)?));
    builder.follow_symlinks(false);
    // Equal files give an equal archive, whatever their times are.
    builder.mode(tar::HeaderMode::Deterministic);
    let place = context.join(source);
    let name: std::path::PathBuf =
        source.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    match fs::symlink_metadata(&place)?.is_dir() {
        true if name.as_os_str().is_empty() => builder.append_dir_all(".", &place)?,
        true => builder.append_dir_all(&name, &place)?,
        false => builder.append_path_with_name(&place, &name)?,
    }
    io::Write::flush(&mut builder.into_inner()?)
}

fn digest(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut ContextReader(&mut hasher))?;
    Ok(hex(&hasher.finalize()))
}

struct ContextReader<'a>(&'a mut Sha256);

impl io::Write for ContextReader<'_> {
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
    fn what_is_not_below_the_file_is_not_copied() {
        for source in ["../x", "/etc/passwd", "a/../../x"] {
            let act = Instruction::Copy {
                source: source.into(),
                target: "x".into(),
                owner: None,
                mode: None,
                hash: String::new(),
                archive: Default::default(),
            };
            assert!(pack_context(act, Path::new("."), Path::new("/nonexistent")).is_err(), "{source}");
        }
    }
}
