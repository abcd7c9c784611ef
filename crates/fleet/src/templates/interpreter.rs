//! The additions of `code-interpreter-v1` to `base`: Python packages, and the server that runs code.

use proto::{
    Failure, Kind,
    template::{StartCommand, TemplateSettings},
};
use tar::{Builder, EntryType, Header};

/// The directory of the server in the template.
const HOME: &str = "opt/palisade/interpreter";
const FILES: &[(&str, &[u8])] = &[
    ("server.py", include_bytes!("../../../../interpreter/server.py")),
    ("contexts.py", include_bytes!("../../../../interpreter/contexts.py")),
    ("kernels.py", include_bytes!("../../../../interpreter/kernels.py")),
    ("python_kernel.py", include_bytes!("../../../../interpreter/python_kernel.py")),
    ("charts.py", include_bytes!("../../../../interpreter/charts.py")),
    ("node_kernel.js", include_bytes!("../../../../interpreter/node_kernel.js")),
];
const PACKAGES: &str = include_str!("../../../../interpreter/packages.txt");
const REQUIREMENTS: &str = include_str!("../../../../interpreter/requirements.txt");

/// The template's settings: those of `base`, with the server as start command.
pub fn settings() -> TemplateSettings {
    let start = StartCommand {
        command: Some(format!("exec python3 -B /{HOME}/server.py")),
        ready: Some("curl --silent --fail --output /dev/null http://127.0.0.1:49999/health".into()),
    };
    TemplateSettings { start: Some(start), ..super::setup::own_settings() }
}

/// Hooks for mmdebstrap that install the packages from PyPI into the new root.
pub fn hooks() -> Vec<String> {
    let wanted: Vec<&str> = REQUIREMENTS
        .lines()
        .chain(PACKAGES.lines())
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let quoted: Vec<String> = wanted.iter().map(|package| format!("'{package}'")).collect();
    vec![
        // pip verifies PyPI with the certificates that this host trusts, which may include those of a proxy.
        r#"cp /etc/ssl/certs/ca-certificates.crt "$1/tmp/ca.crt" || cp "$1/etc/ssl/certs/ca-certificates.crt" "$1/tmp/ca.crt""#.to_owned(),
        format!(r#"chroot "$1" pip install --cert /tmp/ca.crt --no-cache-dir --disable-pip-version-check --root-user-action=ignore --no-input --quiet {}"#, quoted.join(" ")),
        r#"rm -rf "$1"/root/.cache "$1/tmp/ca.crt""#.to_owned(),
    ]
}

/// The archive of the layer that contains the server.
pub fn archive() -> Result<Vec<u8>, Failure> {
    let cannot = |error: std::io::Error| {
        Failure::new(Kind::Internal, "cannot pack the code interpreter").because(error)
    };
    let mut builder = Builder::new(Vec::new());
    for (name, bytes) in FILES {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        builder.append_data(&mut header, format!("{HOME}/{name}"), *bytes).map_err(cannot)?;
    }
    builder.into_inner().map_err(cannot)
}
