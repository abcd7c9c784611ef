//! The options of commands that create a Body.

use std::{path::Path, time::Duration};

use fleet::{Create, LimitRequest, NetworkRequest};
use proto::{
    BodyName, Failure, Kind, Layer, Size,
    spec::{Life, Mount},
    vm::{Engine, Sharing},
};

use super::{
    NetworkArgs,
    values::{self, MountArg},
};
use crate::settings::absolute;

/// Create a Body and leave it running; print its id.
///
/// It runs until `pal rm`, also after the `pal` that created it has ended.
///
/// Example: pal create --memory 512MiB
#[derive(Debug, Clone, clap::Args)]
pub struct BodyArgs {
    /// Name the Body; every command takes the name in place of the id
    #[arg(long, value_name = "NAME")]
    name: Option<BodyName>,
    /// Isolate the Body by this layer; without it, by the strongest that runs at interactive speed on this
    /// host
    #[arg(long, value_name = "LAYER")]
    layer: Option<Layer>,
    /// Run a microVM under this hypervisor: qemu, cloud-hypervisor or firecracker; the last two need KVM
    #[arg(long, value_name = "ENGINE")]
    engine: Option<Engine>,
    /// Start from this template: `host`, which is the default, a name, or the id or name of a snapshot
    #[arg(long, value_name = "TEMPLATE")]
    pub template: Option<String>,
    /// Limit its memory, such as 512MiB
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    memory: Option<Size>,
    /// Limit its CPU time, in CPUs, such as 1.5
    #[arg(long, value_name = "COUNT", value_parser = values::cpus, allow_hyphen_values = true)]
    cpus: Option<u32>,
    /// Limit its processes and threads
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    pids: Option<u32>,
    /// Limit the bytes that it may write to its own files
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    disk: Option<Size>,
    /// Limit the files and directories that it may create; the default is one for each 16 KiB of its disk
    /// limit, at least 4096
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    inodes: Option<u32>,
    /// Limit the open files of each process
    #[arg(long, value_name = "COUNT", value_parser = values::count, allow_hyphen_values = true)]
    files: Option<u32>,
    /// Limit the output of each command that the log keeps
    #[arg(long, value_name = "SIZE", value_parser = values::size, allow_hyphen_values = true)]
    output: Option<Size>,
    /// End it after this long, such as 90s, 10m or 2h
    #[arg(long, value_name = "DURATION", value_parser = values::timeout, allow_hyphen_values = true)]
    pub timeout: Option<Duration>,
    /// Set an environment variable for its commands; may be repeated
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Mount a directory or file of the host, read-only unless `:rw` is given; may be repeated. Git
    /// directories stay read-only unless `:rw,unprotected` is given. A microVM needs `,type=virtiofs`
    #[arg(long, value_name = "SRC:DST[:ro|rw|rw,unprotected][,type=virtiofs]", value_parser = values::mount)]
    mount: Vec<MountArg>,
    /// The earlier spelling of `,type=virtiofs`, for all mounts
    #[arg(long, value_name = "TYPE", hide = true)]
    share: Option<Sharing>,
    /// Run its commands in this directory
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<String>,
    /// Run its commands as this user
    #[arg(long, short = 'u', value_name = "USER")]
    user: Option<String>,
    /// The network.
    #[command(flatten)]
    network: NetworkArgs,
    /// Let the Body use this secret, which it never sees; may be repeated. `pal secret ls` lists them
    #[arg(long, value_name = "NAME")]
    secret: Vec<String>,
    /// Boot a microVM, even if a snapshot of a booted one could be restored
    #[arg(long, alias = "cold")]
    boot: bool,
}

impl BodyArgs {
    /// The network that the Body asks for.
    pub fn network(&self) -> NetworkRequest {
        self.network.request()
    }

    /// The request to create this Body.
    pub fn request(self, life: Life, wall: Option<Duration>) -> Result<Create, Failure> {
        let limits = LimitRequest {
            memory: self.memory,
            cpu_milli: self.cpus,
            pids: self.pids,
            disk: self.disk,
            inodes: self.inodes.map(u64::from),
            files: self.files,
            wall,
            output: self.output,
        };
        let here = |mount: Mount| -> Result<Mount, Failure> {
            Ok(Mount { source: absolute(Path::new(&mount.source))?, ..mount })
        };
        let share = self.sharing()?;
        Ok(Create {
            name: self.name,
            layer: self.layer,
            engine: self.engine,
            template: self.template.unwrap_or_else(|| "host".into()),
            limits,
            env: self.env.into_iter().collect(),
            mounts: self.mount.into_iter().map(|arg| here(arg.mount)).collect::<Result<_, _>>()?,
            share,
            workspaces: Vec::new(),
            home: None,
            at_start: Vec::new(),
            ports: Vec::new(),
            egress: None,
            secrets: self.secret,
            role: proto::spec::BodyRole::Work,
            workdir: self.workdir,
            user: self.user,
            life,
            lease: None,
            cold: self.boot,
        })
    }

    /// How a microVM shares the mounts; all of them must use the same type.
    fn sharing(&self) -> Result<Option<Sharing>, Failure> {
        let named = self.mount.iter().find_map(|arg| arg.sharing);
        let unnamed = self.mount.iter().find(|arg| arg.sharing.is_none());
        match (self.share.or(named), unnamed) {
            (Some(sharing), Some(arg)) if self.share.is_none() => Err(Failure::new(
                Kind::Usage,
                format!("some mounts have a type and the mount of {} has none", arg.mount.source.display()),
            )
            .hint(format!("name the type of every mount: --mount SRC:DST,type={}", sharing.name()))),
            (sharing, _) => Ok(sharing),
        }
    }
}
