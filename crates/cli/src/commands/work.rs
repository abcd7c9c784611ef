//! `pal up`, `prepare`, `diff`, `log`, `land`, `sync`, `compare` and `save`.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use fleet::{
    BodyView, DevcontainerChoice, DiffFormat, ExecRequest, Fleet, GitIdentity, LandSelection, LandTarget,
    LeftOut, PrepareChoice, PrepareRequest, ProgressLine, RepoSource, RepositoryNetwork, SavedModule,
    SkippedPath, SyncMode, UncommittedFiles, UpRequest,
};
use proto::{Failure, Kind, spec::Life};
use rustix::{stdio, termios::isatty};

use super::{
    choose,
    create::{warn_of_mounts, warn_of_request},
};
use crate::{
    age,
    args::{self, BodyArgs},
    output::{self, Format},
    pager,
    progress::{self, ProgressDisplay},
    session::{StdioMode, signals::StopSignals},
    settings::absolute,
    table::Table,
};

/// Environment variables by which the user's git finds keys, agents and proxies.
const PERSONAL: &[&str] = &[
    "GIT_AUTHOR_NAME",
    "GIT_AUTHOR_EMAIL",
    "GIT_AUTHOR_DATE",
    "GIT_COMMITTER_NAME",
    "GIT_COMMITTER_EMAIL",
    "GIT_COMMITTER_DATE",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GNUPGHOME",
    "GPG_TTY",
    "SSH_AUTH_SOCK",
    "XDG_CONFIG_HOME",
    "RUSTUP_HOME",
    "CARGO_HOME",
    "RUSTUP_TOOLCHAIN",
    "http_proxy",
    "https_proxy",
    "HTTPS_PROXY",
    "no_proxy",
    "SSL_CERT_FILE",
    "USER",
    "TERM",
];

/// The identity and settings of the user's git.
pub fn git_identity() -> GitIdentity {
    let env = PERSONAL.iter().filter_map(|name| Some(((*name).into(), std::env::var_os(name)?))).collect();
    let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("/nonexistent"), PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    GitIdentity { home, path, env }
}

/// The request to create Bodies with repositories.
pub fn request(args: &args::RepoArgs, body: BodyArgs) -> Result<UpRequest, Failure> {
    let wall = body.timeout;
    let here =
        || -> Result<Vec<RepoSource>, Failure> { Ok(vec![RepoSource::Path(absolute(Path::new("."))?)]) };
    let named = || args.repo.iter().map(|repo| repository(repo)).collect::<Result<Vec<_>, _>>();
    Ok(UpRequest {
        repositories: if args.repo.is_empty() { here()? } else { named()? },
        reference: args.reference.clone(),
        dirty: if args.uncommitted { UncommittedFiles::With } else { UncommittedFiles::Without },
        include: args.include.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?,
        prepare: match (args.no_prepare, args.keep, args.anyway) {
            (true, ..) => PrepareChoice::No,
            (_, true, _) => PrepareChoice::Keep,
            (.., true) => PrepareChoice::Anyway,
            _ => PrepareChoice::Yes,
        },
        devcontainer: match body.template {
            Some(_) => DevcontainerChoice::Ignore,
            None => DevcontainerChoice::Use,
        },
        person: git_identity(),
        images: super::templates::images::image_of_repository,
        home: args.home.clone(),
        network: body.network(),
        repository_network: RepositoryNetwork::Use,
        create: body.request(Life::Kept, wall)?,
        count: args.count,
    })
}

/// Parses a path or an address of a repository.
fn repository(text: &str) -> Result<RepoSource, Failure> {
    let path = Path::new(text);
    if path.exists() {
        return Ok(RepoSource::Path(absolute(path)?));
    }
    let scheme =
        ["https://", "http://", "ssh://", "git://", "file://"].iter().any(|scheme| text.starts_with(scheme));
    let scp = text.split_once(':').is_some_and(|(host, path)| {
        !host.is_empty()
            && !host.starts_with('-')
            && !host.contains('/')
            && !path.starts_with(':')
            && !path.is_empty()
    });
    if scheme || scp {
        return Ok(RepoSource::Url(text.to_owned()));
    }
    Err(Failure::new(
        Kind::NotFound,
        format!("{} is neither a directory nor the address of a repository", proto::text::visible(text)),
    )
    .hint("name a path or an address: https://, ssh:// or host:path"))
}

/// Creates Bodies; runs the command in the first.
pub async fn up(fleet: &Fleet, args: args::UpArgs, format: Format) -> Result<u8, Failure> {
    let wire = StdioMode::choose(args.wires, format)?;
    let views = match create_bodies(fleet, &args.work, args.work.body.clone(), format).await? {
        ControlFlow::Continue(views) => views,
        ControlFlow::Break(code) => return Ok(code),
    };
    if args.command.is_empty() || format == Format::Text {
        match format {
            Format::Json => output::json_lines(&views)?,
            // With a command, standard output has the command's output, so the id goes to standard error.
            Format::Text if args.command.is_empty() => {
                views.iter().try_for_each(|view| output::line(view.id()))?
            }
            Format::Text => output::talk(&format!("Body {}", views[0].id())),
        }
    }
    if args.command.is_empty() {
        return Ok(0);
    }
    super::exec::join(fleet, Some(views[0].id().as_str()), ExecRequest::new(args.command), wire, format).await
}

/// Creates Bodies with repositories, and says what they lack; a signal that stops it gives the exit code.
pub async fn create_bodies(
    fleet: &Fleet,
    args: &args::RepoArgs,
    body: BodyArgs,
    format: Format,
) -> Result<ControlFlow<u8, Vec<BodyView>>, Failure> {
    let request = request(args, body)?;
    warn_of_mounts(&request.create.mounts, format);
    warn_of_request(&request.network, format)?;
    let display = ProgressDisplay::new("importing the repository");
    let mut say = |line: ProgressLine<'_>| display.show(line);
    let workspaces = fleet.workspaces();
    let work = workspaces.up_with_progress(request.clone(), &mut say);
    let views = match until_stopped(&display, work).await? {
        ControlFlow::Continue(done) => done?,
        ControlFlow::Break(code) => return Ok(ControlFlow::Break(code)),
    };
    for view in views.iter().filter(|view| !view.missing_steps.is_empty()) {
        print_missing(view);
    }
    if !args.committed && !args.uncommitted && args.reference.is_none() {
        let left = request
            .repositories
            .iter()
            .map(|repo| fleet.workspaces().uncommitted(repo, &request.person))
            .sum::<usize>();
        if left > 0 {
            let files = if left == 1 {
                "1 uncommitted file is".to_owned()
            } else {
                format!("{left} uncommitted files are")
            };
            output::talk(&format!(
                "{files} not in the Body\n  hint: include them with `--uncommitted`, or silence this with `--committed`"
            ));
        }
    }
    Ok(ControlFlow::Continue(views))
}

/// Waits for work, or for a signal that stops it: then the work is dropped, and the exit code of the signal returned.
async fn until_stopped<T>(
    display: &ProgressDisplay,
    work: impl Future<Output = T>,
) -> Result<ControlFlow<u8, T>, Failure> {
    let mut signals = StopSignals::listen()?;
    let signal = tokio::select! {
        done = display.watch(work) => return Ok(ControlFlow::Continue(done)),
        signal = signals.next() => signal,
    };
    display.clear();
    output::talk("interrupted");
    Ok(ControlFlow::Break(u8::try_from(128 + signal).unwrap_or(u8::MAX)))
}

/// Says that a Body is prepared in part.
fn print_missing(view: &BodyView) {
    let (id, count) = (view.id(), view.missing_steps.len());
    let steps = if count == 1 { "1 step is".to_owned() } else { format!("{count} steps are") };
    output::talk(&format!(
        "Body {id} is prepared in part: {steps} missing\n  hint: list them with `pal inspect {id}`, run them again with `pal prepare {id}`"
    ));
}

/// Runs the missing prepare steps of a Body again.
pub async fn prepare(fleet: &Fleet, args: &args::PrepareArgs, format: Format) -> Result<u8, Failure> {
    let view = fleet.find(&args.body)?;
    let request = if args.all { PrepareRequest::All } else { PrepareRequest::Missing };
    let display = ProgressDisplay::new("preparing");
    let mut say = |line: ProgressLine<'_>| display.show(line);
    let workspaces = fleet.workspaces();
    let work = workspaces.prepare_again(view.id(), request, &mut say);
    let view = match until_stopped(&display, work).await? {
        ControlFlow::Continue(done) => done?,
        ControlFlow::Break(code) => {
            output::talk(&format!("  hint: the Body has ended; start it: pal start {}", view.id()));
            return Ok(code);
        }
    };
    if !view.missing_steps.is_empty() {
        print_missing(&view);
    }
    match format {
        Format::Json => output::json(&view)?,
        Format::Text => output::line(view.id())?,
    }
    Ok(0)
}

/// Shows what a Body changed.
pub fn diff(fleet: &Fleet, args: &args::DiffArgs, format: Format) -> Result<(), Failure> {
    let view = choose::body(fleet, args.body.as_deref())?;
    if format == Format::Json {
        return output::json(&fleet.workspaces().review_files(view.id(), args.workspace.as_deref())?.diff);
    }
    let look = fleet.workspaces().review(view.id(), args.workspace.as_deref())?;
    let shape = if args.stat { DiffFormat::Stat } else { DiffFormat::Patch };
    show(&look.text(shape, &args.paths)?)?;
    print_skipped(view.id(), &look.diff.workspace, &look.diff.skipped);
    print_left_out(&look.diff.left_out);
    Ok(())
}

/// Escapes text for a terminal; writes the raw bytes to anything else.
fn show(text: &[u8]) -> Result<(), Failure> {
    if isatty(stdio::stdout()) { pager::show_patch(text) } else { output::data(text) }
}

/// The name of the workspace that a command means.
fn workspace_of<'a>(view: &'a BodyView, name: Option<&'a str>) -> &'a str {
    name.or_else(|| view.spec.workspaces.first().map(|first| first.name.as_str())).unwrap_or_default()
}

/// Prints the paths of a workspace that git cannot hold, and for the first of them a command that brings it out.
fn print_skipped(id: &proto::BodyId, workspace: &str, skipped: &[SkippedPath]) {
    for left in skipped {
        output::talk(&format!("skipped: {} ({})", left.path, left.why));
    }
    if let Some(first) = skipped.first() {
        output::talk(&format!("  hint: {}", fleet::way_out(id, workspace, first)));
    }
}

/// Prints work that is neither shown nor landed, and commands that lead to it.
fn print_left_out(left_out: &[LeftOut]) {
    for left in left_out {
        let hint = left.hint.as_ref().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default();
        output::talk(&format!("left out: {} ({}){hint}", left.what, left.why));
    }
}

/// Lists the commits of a Body.
pub async fn log(fleet: &Fleet, args: &args::LogArgs, format: Format) -> Result<(), Failure> {
    let view = choose::body(fleet, args.body.as_deref())?;
    let (saved, commits) = fleet.workspaces().log(view.id(), args.workspace.as_deref()).await?;
    if format == Format::Json {
        return output::json(&serde_json::json!({ "saved": saved, "commits": commits }));
    }
    if let Some(commit_error) = &saved.commit_error {
        output::talk(&format!("the Body's commits cannot be read: {}", proto::text::visible(commit_error)));
    }
    if commits.is_empty() {
        output::talk("no commits");
        return Ok(());
    }
    let mut table = Table::new(&["COMMIT", "AGE", "AUTHOR", "SUBJECT"]);
    for commit in &commits {
        table.row([
            &commit.id[..commit.id.len().min(12)],
            &age::since_seconds(commit.at),
            &commit.author,
            &commit.subject,
        ]);
    }
    output::data(table.render("").as_bytes())
}

/// Saves the work of Bodies.
pub async fn save(fleet: &Fleet, keys: &[String], format: Format) -> Result<(), Failure> {
    for key in keys {
        let view = fleet.find(key)?;
        for saved in progress::watch("saving", fleet.workspaces().save(view.id())).await? {
            match format {
                Format::Json => output::json(&saved)?,
                Format::Text => output::line(&saved.wip)?,
            }
            if let Some(commit_error) = &saved.commit_error {
                output::talk(&format!(
                    "the Body's commits are not saved: {}",
                    proto::text::visible(commit_error)
                ));
            }
            print_submodules(view.id(), &saved.submodules, "is saved in that submodule's own repository");
            print_skipped(view.id(), &saved.workspace, &saved.skipped);
        }
    }
    Ok(())
}

/// Prints how to merge work in submodules, which is in their own repositories.
fn print_submodules(id: &proto::BodyId, submodules: &[SavedModule], what: &str) {
    for module in submodules {
        let path = proto::text::visible(&module.path);
        let quoted = path.replace('\'', "'\\''");
        output::talk(&format!(
            "work in {path} {what}\n  hint: merge it: git -C '{quoted}' merge refs/palisade/{id}/wip"
        ));
    }
}

/// Lands the work of a Body.
pub async fn land(fleet: &Fleet, args: args::LandArgs, format: Format) -> Result<(), Failure> {
    if args.queue {
        return queue(fleet, &args, format).await;
    }
    if args.bodies.len() > 1 {
        return Err(Failure::new(Kind::Usage, "several Bodies can land only with --queue")
            .hint("pal land --queue --onto BRANCH BODY..."));
    }
    let view = choose::body(fleet, args.bodies.first().map(String::as_str))?;
    let name = args.workspace.as_deref();
    if args.patch {
        let look = fleet.workspaces().review(view.id(), name)?;
        let patch = look.text(DiffFormat::Patch, &[])?;
        if format == Format::Json {
            let (skipped, left_out) = (&look.diff.skipped, &look.diff.left_out);
            let patch = output::text_or_hex(&patch);
            return output::json(
                &serde_json::json!({ "patch": patch, "skipped": skipped, "left_out": left_out }),
            );
        }
        print_skipped(view.id(), &look.diff.workspace, &look.diff.skipped);
        print_left_out(&look.diff.left_out);
        return show(&patch);
    }
    let how = match (args.branch, args.onto) {
        (_, Some(onto)) => LandTarget::Onto(onto),
        (Some(branch), None) => LandTarget::Branch(branch),
        (None, None) => LandTarget::Branch(format!("pal/{}", view.id())),
    };
    let what = match (args.squash, args.pick.is_empty(), args.committed, args.message) {
        (true, _, _, message) => LandSelection::Squash { message },
        (_, false, ..) => LandSelection::Pick(args.pick),
        (_, _, true, _) => LandSelection::Committed,
        (.., Some(message)) => LandSelection::AllWithMessage(message),
        (.., None) => LandSelection::All,
    };
    let landed =
        progress::watch("landing", fleet.workspaces().land(view.id(), name, how, what, &git_identity()))
            .await?;
    if format == Format::Json {
        return output::json(&landed);
    }
    for path in &landed.auto_executed {
        output::talk(&format!("check {} before you use it: tools execute it", proto::text::visible(path)));
    }
    print_submodules(
        view.id(),
        &landed.submodules,
        "did not land; it is saved in that submodule's own repository",
    );
    print_skipped(view.id(), workspace_of(&view, name), &landed.skipped);
    print_left_out(&landed.left_out);
    if let Some(why) = landed.combined {
        output::talk(&format!("its commits landed as one: {why}"));
    }
    match landed.commits {
        0 => output::talk("nothing to land"),
        1 => output::talk(&format!("1 commit on {}", landed.branch)),
        commits => output::talk(&format!("{commits} commits on {}", landed.branch)),
    }
    output::line(&landed.to)
}

/// Brings new commits of the user's branch into a Body.
pub async fn sync(fleet: &Fleet, args: &args::SyncArgs, format: Format) -> Result<(), Failure> {
    let view = fleet.find(&args.body)?;
    let mode = match (args.merge, args.rebase) {
        (true, _) => SyncMode::Merge,
        (_, true) => SyncMode::Rebase,
        _ => SyncMode::Fetch,
    };
    let (person, workspaces) = (git_identity(), fleet.workspaces());
    let sync = workspaces.sync(view.id(), args.workspace.as_deref(), args.branch.as_deref(), mode, &person);
    let synced = progress::watch("bringing the commits in", sync).await?;
    if format == Format::Json {
        return output::json(&synced);
    }
    let commits = if synced.commits == 1 { "commit" } else { "commits" };
    output::talk(&format!("{} new {commits}: host/{} in the Body", synced.commits, synced.branch));
    output::line(&synced.commit)
}

/// Lands Bodies in order.
async fn queue(fleet: &Fleet, args: &args::LandArgs, format: Format) -> Result<(), Failure> {
    let ids =
        args.bodies.iter().map(|key| Ok(fleet.find(key)?.spec.id)).collect::<Result<Vec<_>, Failure>>()?;
    let onto = args.onto.as_deref().unwrap_or_default();
    let person = git_identity();
    let display = ProgressDisplay::new("landing");
    let mut say = |line: ProgressLine<'_>| display.show(line);
    let workspaces = fleet.workspaces();
    let work = workspaces.land_queue(&ids, onto, args.test.as_deref(), &person, &mut say);
    let queued = display.watch(work).await?;
    if format == Format::Json {
        output::json_lines(&queued)?;
    } else {
        for one in &queued {
            if let Some(landed) = &one.landed {
                let view = fleet.view(&one.body)?;
                print_skipped(view.id(), workspace_of(&view, None), &landed.skipped);
                print_left_out(&landed.left_out);
            }
            match (&one.landed, &one.why) {
                (Some(landed), _) => output::line(format!("{} landed {}", one.body, landed.to))?,
                _ if one.nothing => output::line(format!("{} nothing to land", one.body))?,
                (_, why) => output::line(format!(
                    "{} did not land: {}",
                    one.body,
                    proto::text::visible(why.as_deref().unwrap_or_default())
                ))?,
            }
        }
    }
    let left = queued.iter().filter(|one| one.why.is_some()).count();
    if left == 0 {
        Ok(())
    } else {
        Err(Failure::new(Kind::Conflict, format!("{left} of {} did not land", queued.len()))
            .hint("their work is still in their Bodies"))
    }
}

/// Compares Bodies.
pub async fn compare(fleet: &Fleet, args: &args::CompareArgs, format: Format) -> Result<(), Failure> {
    let ids =
        args.bodies.iter().map(|key| Ok(fleet.find(key)?.spec.id)).collect::<Result<Vec<_>, Failure>>()?;
    let compared =
        progress::watch("comparing", fleet.workspaces().compare(&ids, args.test.as_deref())).await?;
    if format == Format::Json {
        return output::json(&compared);
    }
    let mut table = Table::new(&["BODY", "FILES", "ADDED", "REMOVED", "TEST"]);
    for body in &compared.bodies {
        let sum = |count: fn(&fleet::ChangedFile) -> Option<u64>| {
            body.files.iter().filter_map(count).sum::<u64>().to_string()
        };
        let test = body.test.map_or_else(
            || "-".to_owned(),
            |code| match (code, &body.last_line) {
                (0, _) => "passed".to_owned(),
                (code, Some(line)) => format!("code {code}: {line}"),
                (code, None) => format!("code {code}"),
            },
        );
        table.row([
            body.body.as_str(),
            &body.files.len().to_string(),
            &sum(|file| file.added),
            &sum(|file| file.removed),
            &test,
        ]);
    }
    output::data(table.render("").as_bytes())?;
    for overlap in &compared.overlaps {
        let shown = |paths: &[String]| {
            paths.iter().map(|path| proto::text::visible(path)).collect::<Vec<_>>().join(", ")
        };
        let (one, other) = (&overlap.one, &overlap.other);
        match overlap.conflicts.is_empty() {
            true => output::line(format!(
                "{one} and {other} both change {}, and can both land",
                shown(&overlap.files)
            ))?,
            false => output::line(format!(
                "{one} and {other} conflict in {}, whichever lands first",
                shown(&overlap.conflicts)
            ))?,
        }
    }
    Ok(())
}

/// Prints the work that is lost with a Body.
pub fn print_unsaved(fleet: &Fleet, id: &proto::BodyId) -> Result<(), Failure> {
    let lost = fleet.workspaces().unsaved_work(id)?;
    for line in &lost.lines {
        output::talk(&format!("lost: {}", proto::text::visible(line)));
    }
    if lost.saved {
        output::talk(&format!("the last save stays: refs/palisade/{id}/wip"));
    }
    Ok(())
}
