//! Running builds: their log, their cancellation and their status afterwards.
//!
//! Invariant: a line of a build's log is on disk before a client can read it, so a polling client continues where it
//! was even if the server was killed in between. A build whose process is gone is reported as interrupted.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{BufRead, Read, Write},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use proto::{
    Failure, Kind, Size, TemplateId,
    template::{BuildId, DEFAULT_TAG, TemplateName},
};
use serde::{Deserialize, Serialize};
use store::RecordTable;
use tokio::sync::{Notify, Semaphore};

use super::build_key;
use crate::{
    Builds, lock_mutex,
    records::{BUILD_JOBS, key_of},
};

/// Most bytes of a build's log; the rest is dropped.
const LOG_BYTES_MAX: usize = 4 << 20;
const LINE_LEN_MAX: usize = 4096;
/// Longest log file, which also contains JSON escapes and times.
const LOG_FILE_MAX: u64 = 64 << 20;
const CUT_SHORT: &str =
    "the build was interrupted: its process is gone; build again, and finished steps are reused";
/// Most builds that run at the same time; others wait.
const AT_ONCE: usize = 2;
/// Most builds whose log stays in memory.
const JOBS_MAX: usize = 256;
/// Most builds of one template that are requested and not started.
const WAITING_MAX: usize = 64;

/// One line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// The time, RFC 3339.
    pub at: String,
    /// The text.
    pub message: String,
    /// The severity.
    pub level: Cow<'static, str>,
}

/// The state of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildState {
    /// Requested, not started.
    Waiting,
    /// Running, or waiting for other builds.
    Building,
    /// Complete.
    Ready,
    /// Failed.
    Error {
        /// The step that failed: `base`, a number from 1 on, or `finalize`.
        step: Option<String>,
        /// The reason.
        message: String,
    },
}

/// The record of a build that is not complete.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BuildJobRecord {
    tags: Vec<String>,
    cpu_milli: Option<u32>,
    memory: Option<Size>,
    #[serde(default)]
    failed: Option<(Option<String>, String)>,
    /// The process that builds it, by pid and start time.
    #[serde(default)]
    begun: Option<(i32, u64)>,
}

/// A build.
#[derive(Debug)]
pub struct BuildJob {
    /// The id of the build.
    pub id: BuildId,
    /// The template.
    pub template: TemplateId,
    /// Tags that will refer to this build.
    pub tags: Vec<String>,
    /// CPU limit of its Bodies, in thousandths of a CPU.
    pub cpu_milli: Option<u32>,
    /// Memory limit of its Bodies.
    pub memory: Option<Size>,
    log: Mutex<BuildLog>,
    off: Mutex<bool>,
    told_off: Notify,
}

#[derive(Debug)]
struct BuildLog {
    state: BuildState,
    lines: Vec<LogLine>,
    bytes: usize,
    source: String,
    /// The log file, from which other processes read the lines.
    file: Option<File>,
}

impl BuildLog {
    fn new() -> Self {
        Self { state: BuildState::Waiting, lines: Vec::new(), bytes: 0, source: String::new(), file: None }
    }
}

/// The builds of this process.
#[derive(Debug)]
pub(crate) struct BuildJobs {
    running: Mutex<HashMap<BuildId, Arc<BuildJob>>>,
    turns: Arc<Semaphore>,
}

impl Default for BuildJobs {
    fn default() -> Self {
        Self { running: Mutex::default(), turns: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

impl BuildJob {
    /// Adds a line to the log.
    pub fn say(&self, message: &str) {
        self.write(message, "info");
    }

    /// Adds a warning to the log.
    pub(crate) fn warn(&self, message: &str) {
        self.write(message, "warn");
    }

    fn write(&self, message: &str, level: &'static str) {
        let mut log = lock_mutex(&self.log);
        if log.lines.is_empty() {
            log.source = message.chars().take(200).collect();
        }
        if log.bytes >= LOG_BYTES_MAX {
            return;
        }
        let mut message: String = message.chars().take(LINE_LEN_MAX).collect();
        log.bytes += message.len() + 64;
        if log.bytes >= LOG_BYTES_MAX {
            message = "the build's log is longer than 4 MiB; the rest is dropped".into();
        }
        let said = LogLine { at: store::clock::now(), message, level: level.into() };
        // A full disk loses lines of the log, but does not fail the build.
        if let (Some(file), Ok(line)) = (&mut log.file, serde_json::to_string(&said)) {
            // After a partial line, the next line would be unreadable too, so the file is given up.
            if file.write_all(format!("{line}\n").as_bytes()).is_err() {
                log.file = None;
            }
        }
        log.lines.push(said);
    }

    /// The description of the base.
    pub(crate) fn source(&self) -> String {
        lock_mutex(&self.log).source.clone()
    }

    pub(crate) fn ended(&self, message: &str) {
        self.say(message);
        let mut log = lock_mutex(&self.log);
        log.state = BuildState::Ready;
        log.file = None;
    }

    pub(crate) fn failed(&self, step: &str, failure: &Failure) {
        let causes: String = failure.causes().iter().map(|cause| format!(": {cause}")).collect();
        self.write(&format!("{failure}{causes}"), "error");
        failure.hints.iter().for_each(|hint| self.write(&format!("hint: {hint}"), "info"));
        let mut log = lock_mutex(&self.log);
        log.state = BuildState::Error { step: Some(step.to_owned()), message: failure.to_string() };
        log.file = None;
    }

    /// The state of the build, and the lines of its log from `offset` on.
    pub fn log_lines(&self, offset: usize, limit: usize) -> (BuildState, Vec<LogLine>) {
        let log = lock_mutex(&self.log);
        (log.state.clone(), log.lines.iter().skip(offset).take(limit).cloned().collect())
    }

    /// Cancels the build: it ends at its next check.
    pub fn cancel(&self) {
        *lock_mutex(&self.off) = true;
        self.told_off.notify_waiters();
    }

    /// Fails if the build was cancelled.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if *lock_mutex(&self.off) { Err(cancelled_failure()) } else { Ok(()) }
    }

    /// Waits until the build is cancelled.
    pub(crate) async fn wait_cancelled(&self) {
        loop {
            let told = self.told_off.notified();
            if *lock_mutex(&self.off) {
                return;
            }
            let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
        }
    }

    /// A writer that splits output into lines of the log.
    pub(crate) fn lines(&self) -> LineWriter<'_> {
        LineWriter { job: self, held: Vec::new(), tail: Vec::new() }
    }
}

pub(crate) fn cancelled_failure() -> Failure {
    Failure::new(Kind::Conflict, "the build was cancelled")
}

/// Splits output into lines of the log.
pub(crate) struct LineWriter<'a> {
    job: &'a BuildJob,
    held: Vec<u8>,
    tail: Vec<u8>,
}

impl LineWriter<'_> {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        let surplus = self.tail.len().saturating_sub(2 * LINE_LEN_MAX);
        self.tail.drain(..surplus);
        for byte in bytes {
            if *byte == b'\n' || self.held.len() >= LINE_LEN_MAX {
                self.line();
            }
            if *byte != b'\n' {
                self.held.push(*byte);
            }
        }
    }

    fn line(&mut self) {
        let line = std::mem::take(&mut self.held);
        let text = String::from_utf8_lossy(&line);
        self.job.say(text.trim_end_matches('\r'));
    }

    /// Flushes the last line, and returns the last `max` bytes of the output as text.
    pub(crate) fn finish(mut self, max: usize) -> String {
        if !self.held.is_empty() {
            self.line();
        }
        let from = self.tail.len().saturating_sub(max);
        String::from_utf8_lossy(&self.tail[from..]).into_owned()
    }
}

impl Builds<'_> {
    /// Requests a build of the template of that name, and creates the template if there is none.
    pub fn request(
        &self,
        name: &str,
        tags: &[String],
        cpu_milli: Option<u32>,
        memory: Option<Size>,
    ) -> Result<Arc<BuildJob>, Failure> {
        let named: TemplateName = name
            .parse()
            .map_err(|error: proto::template::NameError| Failure::new(Kind::Usage, error.to_string()))?;
        let mut tags: Vec<String> = tags.iter().cloned().chain(named.tag).collect();
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned());
        }
        tags.sort();
        tags.dedup();
        super::check_tags(&tags)?;
        let template = self.fleet.templates().find_or_create(&named.name)?;
        let job = BuildJob {
            id: super::build::job_id()?,
            template: template.id,
            tags,
            cpu_milli,
            memory,
            log: Mutex::new(BuildLog::new()),
            off: Mutex::new(false),
            told_off: Notify::new(),
        };
        if self.table().list(Some(&key_of([job.template.as_str()])?))?.records.len() >= WAITING_MAX {
            self.drop_old_jobs(&job.template)?;
        }
        self.write_job(&job, None, None)?;
        Ok(self.jobs.add(job))
    }

    /// Takes a requested build; the caller starts it.
    pub fn begin(&self, template: &TemplateId, id: &BuildId) -> Result<Arc<BuildJob>, Failure> {
        let job = self.job(template, id)?;
        let mut log = lock_mutex(&job.log);
        if log.state != BuildState::Waiting {
            return Err(Failure::new(Kind::Conflict, format!("build {id} was already started"))
                .hint("request another build"));
        }
        let pid = std::process::id() as i32;
        self.write_job(&job, None, sys::proc::start_ticks(pid).ok().map(|ticks| (pid, ticks)))?;
        let path = self.log_path(template, id);
        let file = fs::create_dir_all(path.parent().unwrap_or(&path))
            .and_then(|()| OpenOptions::new().create(true).append(true).open(&path));
        log.file = Some(file.map_err(|error| {
            Failure::new(Kind::Host, "cannot create the log of the build")
                .because(error)
                .hint("make room: pal gc")
        })?);
        log.state = BuildState::Building;
        drop(log);
        Ok(job)
    }

    /// Waits until fewer than the maximum of builds run.
    pub async fn wait_turn(&self) -> Option<tokio::sync::OwnedSemaphorePermit> {
        self.jobs.turns.clone().acquire_owned().await.ok()
    }

    fn job(&self, template: &TemplateId, id: &BuildId) -> Result<Arc<BuildJob>, Failure> {
        let known = lock_mutex(&self.jobs.running).get(id).filter(|job| job.template == *template).cloned();
        if let Some(job) = known {
            return Ok(job);
        }
        // A process that is gone requested this build.
        let unknown =
            || Failure::new(Kind::NotFound, format!("there is no build {id} of template {template}"));
        let key = build_key(template, id)?;
        if self.fleet.templates().build(template, id)?.is_some() {
            // The build was complete, but its process ended before it removed the job.
            self.table().remove(&key)?;
        }
        let asked = self.table().get(&key)?.ok_or_else(unknown)?.value;
        let job = BuildJob {
            id: id.clone(),
            template: template.clone(),
            tags: asked.tags,
            cpu_milli: asked.cpu_milli,
            memory: asked.memory,
            log: Mutex::new(BuildLog::new()),
            off: Mutex::new(false),
            told_off: Notify::new(),
        };
        let mut log = lock_mutex(&job.log);
        log.lines = self.earlier_lines(template, id);
        match (asked.failed, asked.begun) {
            (Some((step, message)), _) => log.state = BuildState::Error { step, message },
            (None, Some((pid, ticks))) if body::dir::alive(pid, ticks).is_some() => {
                // Another process runs this build, so this state is not cached.
                log.state = BuildState::Building;
                drop(log);
                return Ok(Arc::new(job));
            }
            (None, Some(_)) => log.state = BuildState::Error { step: None, message: CUT_SHORT.into() },
            (None, None) => {}
        }
        drop(log);
        Ok(self.jobs.add(job))
    }

    /// The state of a build, and the lines of its log from an offset on.
    pub fn status(
        &self,
        template: &TemplateId,
        id: &BuildId,
        offset: usize,
        limit: usize,
    ) -> Result<(BuildState, Vec<LogLine>), Failure> {
        if let Ok(job) = self.job(template, id) {
            return Ok(job.log_lines(offset, limit));
        }
        if self.fleet.templates().build(template, id)?.is_some() {
            return Ok((
                BuildState::Ready,
                self.earlier_lines(template, id).into_iter().skip(offset).take(limit).collect(),
            ));
        }
        Err(Failure::new(Kind::NotFound, format!("there is no build {id} of template {template}")))
    }

    /// Reads the log file of a build, up to where its process came.
    fn earlier_lines(&self, template: &TemplateId, id: &BuildId) -> Vec<LogLine> {
        let Ok(file) = std::fs::File::open(self.log_path(template, id)) else { return Vec::new() };
        let lines = std::io::BufReader::new(file.take(LOG_FILE_MAX)).split(b'\n').map_while(Result::ok);
        // The last line may be truncated, even within a character.
        lines.filter_map(|line| serde_json::from_slice(&line).ok()).collect()
    }

    fn table(&self) -> RecordTable<'_, BuildJobRecord> {
        self.fleet.table(BUILD_JOBS)
    }

    fn log_path(&self, template: &TemplateId, id: &BuildId) -> PathBuf {
        self.fleet.templates().template_dir(template).join("builds").join(format!("{id}.log"))
    }

    fn write_job(
        &self,
        job: &BuildJob,
        failed: Option<(Option<String>, String)>,
        begun: Option<(i32, u64)>,
    ) -> Result<(), Failure> {
        let asked = BuildJobRecord {
            tags: job.tags.clone(),
            cpu_milli: job.cpu_milli,
            memory: job.memory,
            failed,
            begun,
        };
        Ok(self.table().put(&build_key(&job.template, &job.id)?, &asked)?)
    }

    pub(crate) fn note_failed(&self, job: &BuildJob, step: &str, failure: &Failure) -> Result<(), Failure> {
        self.write_job(job, Some((Some(step.to_owned()), failure.to_string())), None)
    }

    pub(crate) fn forget_job(&self, job: &BuildJob) -> Result<(), Failure> {
        self.table().remove(&build_key(&job.template, &job.id)?)?;
        Ok(())
    }

    /// Removes the jobs of a template that no process works on.
    fn drop_old_jobs(&self, template: &TemplateId) -> Result<(), Failure> {
        for record in self.table().list(Some(&key_of([template.as_str()])?))?.records {
            let id = record.key.as_str().rsplit('.').next().and_then(|id| id.parse::<BuildId>().ok());
            let Some(id) = id else { continue };
            let is_elsewhere = || {
                record.value.begun.is_some_and(|(pid, ticks)| body::dir::alive(pid, ticks).is_some())
                    && record.value.failed.is_none()
            };
            if lock_mutex(&self.jobs.running).contains_key(&id) || is_elsewhere() {
                continue;
            }
            let _ = fs::remove_file(self.log_path(template, &id));
            self.table().remove(&record.key)?;
        }
        Ok(())
    }
}

impl BuildJobs {
    /// Cancels every build of a template.
    pub(crate) fn cancel_builds_of(&self, template: &TemplateId) {
        lock_mutex(&self.running)
            .values()
            .filter(|job| job.template == *template)
            .for_each(|job| job.cancel());
    }

    fn add(&self, job: BuildJob) -> Arc<BuildJob> {
        let job = Arc::new(job);
        let mut running = lock_mutex(&self.running);
        if running.len() >= JOBS_MAX {
            running.retain(|_, job| lock_mutex(&job.log).state == BuildState::Building);
        }
        running.insert(job.id.clone(), job.clone());
        job
    }
}
