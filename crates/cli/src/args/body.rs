//! What a Body may be asked to be.

use std::{path::Path, time::Duration};

use fleet::{AskedLimits, Create};
use proto::{
    Failure, Layer, Size,
    spec::{Life, Mount},
    vm::{Engine, Sharing},
};

use super::values;
use crate::settings::absolute;

/// Make a Body and leave it running; print its id.
///
/// It stays until `pal rm`, whatever becomes of the `pal` that made it.
///
/// Example: pal create --memory 512MiB
#[derive(Debug, Clone, clap::Args)]
pub struct BodyArgs {
    /// Hold the Body by this layer; without it, by the strongest that runs at interactive speed here
    #[arg(long, value_name = "LAYER")]
    layer: Option<Layer>,
    /// Have a microVM driven by this: qemu, cloud-hypervisor or firecracker; the last two need KVM
    #[arg(long, value_name = "ENGINE")]
    engine: Option<Engine>,
    /// Start from this: `host`, or the id or name of a snapshot
    #[arg(long, value_name = "TEMPLATE", default_value = "host")]
    template: String,
    /// Bound its memory, such as 512MiB
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    memory: Option<Size>,
    /// Bound its processor time, such as 1.5
    #[arg(long, value_name = "COUNT", value_parser = values::cpus, allow_hyphen_values = true)]
    cpus: Option<u32>,
    /// Bound its processes and threads
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    pids: Option<u32>,
    /// Bound what it may write to its own files
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    disk: Option<Size>,
    /// Bound the open files of each process
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    files: Option<u32>,
    /// Bound the output that the log keeps of each command
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    output: Option<Size>,
    /// End it after this long, such as 90s, 10m or 2h
    #[arg(long, value_name = "DURATION", value_parser = values::timeout, allow_hyphen_values = true)]
    pub timeout: Option<Duration>,
    /// Set a variable for its commands; may be repeated
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Show it a directory or file of the host, read-only unless `:rw` is said; may be repeated
    #[arg(long, value_name = "SRC:DST[:ro|rw]", value_parser = values::mount)]
    mount: Vec<Mount>,
    /// Have a microVM see what is mounted live, by this: virtiofs; without it nothing of the host is mounted in one
    #[arg(long, value_name = "HOW")]
    share: Option<Sharing>,
    /// Run its commands in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<String>,
    /// Run its commands as this user
    #[arg(long, short = 'u', value_name = "USER")]
    user: Option<String>,
    /// Boot a microVM, also where one like it could be thawed
    #[arg(long)]
    cold: bool,
}

impl BodyArgs {
    /// The Body that is asked for.
    pub fn request(self, life: Life, wall: Option<Duration>) -> Result<Create, Failure> {
        let limits = AskedLimits {
            memory: self.memory,
            cpu_milli: self.cpus,
            pids: self.pids,
            disk: self.disk,
            files: self.files,
            wall,
            output: self.output,
        };
        let here = |mount: Mount| -> Result<Mount, Failure> {
            Ok(Mount { source: absolute(Path::new(&mount.source))?, ..mount })
        };
        Ok(Create {
            layer: self.layer,
            engine: self.engine,
            template: self.template,
            limits,
            env: self.env.into_iter().collect(),
            mounts: self.mount.into_iter().map(here).collect::<Result<_, _>>()?,
            share: self.share,
            workspaces: Vec::new(),
            home: None,
            at_start: Vec::new(),
            ports: Vec::new(),
            egress: None,
            workdir: self.workdir,
            user: self.user,
            life,
            lease: None,
            cold: self.cold,
            of_many: false,
            first: None,
        })
    }
}
