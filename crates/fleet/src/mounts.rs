//! Checks which host directories a Body may mount writable.

use std::path::Path;

use proto::{Failure, Kind, spec::Access};

/// Refuses a writable mount of a git directory, or of a path inside one, unless the user asked for `unprotected`: the
/// launcher would mount it read-only.
pub fn check_git(source: &Path, access: Access) -> Result<(), Failure> {
    if access != Access::ReadWrite {
        return Ok(());
    }
    let is_git = |dir: &Path| {
        let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
        dir.file_name().is_some_and(|name| name == ".git")
            || has("HEAD") && (has("commondir") || has("objects") && has("refs"))
    };
    match source.ancestors().find(|dir| is_git(dir)) {
        None => Ok(()),
        Some(dir) => Err(Failure::new(
            Kind::Usage,
            format!(
                "{} is a git directory: git on this host would run what a Body writes there",
                dir.display()
            ),
        )
        .hint("mount it read-only, or allow the writes: SRC:DST:rw,unprotected")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_git_directory_is_writable_only_when_that_is_said() {
        let dir = std::env::temp_dir().join(format!("pal-mounts-{}", std::process::id()));
        for made in ["repo/.git/hooks", "bare/objects", "bare/refs", "plain/objects"] {
            std::fs::create_dir_all(dir.join(made)).unwrap();
        }
        std::fs::write(dir.join("bare/HEAD"), "").unwrap();
        for (name, refused) in [
            ("repo", false),
            ("plain", false),
            ("repo/.git", true),
            ("repo/.git/hooks", true),
            ("bare/refs", true),
        ] {
            let checked = |access| check_git(&dir.join(name), access).is_err();
            assert_eq!(checked(Access::ReadWrite), refused, "{name}");
            assert!(!checked(Access::Unprotected) && !checked(Access::ReadOnly), "{name}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
