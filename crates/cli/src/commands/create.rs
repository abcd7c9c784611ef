//! `pal create`.

use std::path::PathBuf;

use fleet::{Fleet, NetworkRequest, Preset};
use proto::{
    Failure,
    spec::{Egress, Life, Mount},
};

use super::choose;
use crate::{
    args::BodyArgs,
    failure,
    output::{self, Format},
    progress,
};

/// Warns of mounts that give a Body more than a user may expect.
pub fn warn_of_mounts(mounts: &[Mount], format: Format) {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    fleet::mount_warnings(mounts, home.as_deref()).iter().for_each(|warning| failure::warn(warning, format));
}

/// The policy of a Body without a repository of its own. Warns of rules that open more than a user may expect.
pub fn network(fleet: &Fleet, request: &NetworkRequest, format: Format) -> Result<Option<Egress>, Failure> {
    let remotes = match request.needs_remotes() {
        true => choose::repository_here(fleet).map(|here| fleet::remote_addresses(&here)),
        false => None,
    };
    let egress = request.policy(&remotes.unwrap_or_default())?;
    egress.iter().for_each(|egress| warn_of_network(egress, format));
    Ok(egress)
}

fn warn_of_network(egress: &Egress, format: Format) {
    fleet::network_warnings(egress).iter().for_each(|warning| failure::warn(warning, format));
}

/// Warns of the rules of a request whose remotes are not known yet; they are names.
pub fn warn_of_request(request: &NetworkRequest, format: Format) -> Result<(), Failure> {
    let mut known = request.clone();
    known.presets.retain(|preset| *preset != Preset::Git);
    known.policy(&[])?.iter().for_each(|egress| warn_of_network(egress, format));
    Ok(())
}

/// Creates a Body that stays.
pub async fn create(fleet: &Fleet, args: BodyArgs, format: Format) -> Result<(), Failure> {
    let wall = args.timeout;
    let asked = args.network();
    let mut request = args.request(Life::Kept, wall)?;
    request.egress = network(fleet, &asked, format)?;
    warn_of_mounts(&request.mounts, format);
    let view = progress::watch("creating the Body", fleet.create(request)).await?;
    match format {
        Format::Text => output::line(view.id()),
        Format::Json => output::json(&view),
    }
}
