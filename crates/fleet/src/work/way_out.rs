//! The command that brings out a file or directory that git cannot hold.

use proto::BodyId;
use workspace::SkippedPath;

/// The command for a path that a save, a diff or a landing of a Body skipped.
pub fn way_out(body: &BodyId, workspace: &str, left: &SkippedPath) -> String {
    let place = format!("/{}/{workspace}", proto::workspace::PLACE);
    match left.path.strip_suffix("/.git") {
        // A git directory does not come out of a Body as it is: its settings name programs. A bundle has only commits.
        Some(dir) => format!(
            "pal exec {body} -- git -C {} bundle create /tmp/commits.bundle --all && pal cp {body}:/tmp/commits.bundle .",
            quoted(&format!("{place}/{dir}"))
        ),
        None => format!("pal cp {} .", quoted(&format!("{body}:{place}/{}", left.path))),
    }
}

/// A word of a shell line. The text is escaped for a terminal, so a path with other characters than plain ones cannot be
/// told from it; the user completes it.
fn quoted(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-:@+,=%".contains(&byte);
    if text.bytes().all(is_plain) {
        return text.to_owned();
    }
    if !text.contains(['\'', '\\']) {
        return format!("'{text}'");
    }
    let dir = text.bytes().take_while(|byte| is_plain(*byte)).count();
    let dir = text[..dir].rfind('/').map_or("", |slash| &text[..=slash]);
    format!("{dir}PATH")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_out_is_a_command_that_a_shell_reads_as_meant() {
        let body: BodyId = "k3v9m2hfx4pa".parse().unwrap();
        let way = |path: &str| way_out(&body, "app", &SkippedPath { path: path.into(), why: "" });
        assert_eq!(way("big/file"), "pal cp k3v9m2hfx4pa:/workspace/app/big/file .");
        assert_eq!(way("a b"), "pal cp 'k3v9m2hfx4pa:/workspace/app/a b' .");
        assert_eq!(way("a$(x)"), "pal cp 'k3v9m2hfx4pa:/workspace/app/a$(x)' .");
        assert_eq!(way("in/it's"), "pal cp k3v9m2hfx4pa:/workspace/app/in/PATH .");
        assert_eq!(way("a\\n"), "pal cp k3v9m2hfx4pa:/workspace/app/PATH .");
        assert_eq!(
            way("in/.git"),
            "pal exec k3v9m2hfx4pa -- git -C /workspace/app/in bundle create /tmp/commits.bundle --all && pal cp k3v9m2hfx4pa:/tmp/commits.bundle ."
        );
        assert_eq!(way("x.git"), "pal cp k3v9m2hfx4pa:/workspace/app/x.git .");
    }
}
