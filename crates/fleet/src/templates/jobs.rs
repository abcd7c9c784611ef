//! Builds that run: what they said, whether they are called off, and what is known of them afterwards.
//!
//! Invariant: what a build said is on disk before anybody can have read it, so a client that polls goes on where it was
//! also when the server was killed in between; a build whose process is gone says that it was cut short.

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

/// How much of what a build says is kept: the end of it goes.
const LOG_BYTES_MAX: usize = 4 << 20;
const LINE_LEN_MAX: usize = 4096;
/// Longest file of what a build said: escapes and times beside the words.
const LOG_FILE_MAX: u64 = 64 << 20;
const CUT_SHORT: &str = "the build was cut short: the process that built it is gone; build it again, and steps that were done are not done again";
/// Builds that work at the same time; others wait.
const AT_ONCE: usize = 2;
/// Builds whose words are still in memory.
const JOBS_MAX: usize = 256;
/// Builds that were asked for and not begun, of one template.
const WAITING_MAX: usize = 64;

/// One line that a build said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// When, RFC 3339.
    pub at: String,
    /// What.
    pub message: String,
    /// How bad.
    pub level: Cow<'static, str>,
}

/// How a build is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildState {
    /// Asked for, not begun.
    Waiting,
    /// At work, or waiting for others to end.
    Building,
    /// Whole.
    Ready,
    /// Given up, at that step and for that reason.
    Error {
        /// `base`, a number from 1 on, or `finalize`.
        step: Option<String>,
        /// Why.
        message: String,
    },
}

/// What is written down of a build that is not whole.
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

/// One build.
#[derive(Debug)]
pub struct BuildJob {
    /// Which.
    pub id: BuildId,
    /// Of which template.
    pub template: TemplateId,
    /// Tags that will mean it.
    pub tags: Vec<String>,
    /// Processor time of its Bodies.
    pub cpu_milli: Option<u32>,
    /// Memory of its Bodies.
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
    /// The same lines for whoever comes later, from another process.
    file: Option<File>,
}

impl BuildLog {
    fn new() -> Self {
        Self { state: BuildState::Waiting, lines: Vec::new(), bytes: 0, source: String::new(), file: None }
    }
}

/// Builds of this process.
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
    /// Adds a line.
    pub fn say(&self, message: &str) {
        self.write(message, "info");
    }

    /// Adds a line that asks for attention.
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
            message = "the build says more than 4 MiB; the rest is not kept".into();
        }
        let said = LogLine { at: store::clock::now(), message, level: level.into() };
        // A disk that is full costs the words of a build, not the build.
        if let (Some(file), Ok(line)) = (&mut log.file, serde_json::to_string(&said)) {
            // A line that is written by half would take the next one with it.
            if file.write_all(format!("{line}\n").as_bytes()).is_err() {
                log.file = None;
            }
        }
        log.lines.push(said);
    }

    /// What it began with, in words.
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

    /// How it is, and what it said from a line on.
    pub fn log_lines(&self, offset: usize, limit: usize) -> (BuildState, Vec<LogLine>) {
        let log = lock_mutex(&self.log);
        (log.state.clone(), log.lines.iter().skip(offset).take(limit).cloned().collect())
    }

    /// Calls it off: it ends as soon as it notices.
    pub fn cancel(&self) {
        *lock_mutex(&self.off) = true;
        self.told_off.notify_waiters();
    }

    /// Fails where it was called off.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if *lock_mutex(&self.off) { Err(cancelled_failure()) } else { Ok(()) }
    }

    /// Waits until it is.
    pub(crate) async fn wait_cancelled(&self) {
        loop {
            let told = self.told_off.notified();
            if *lock_mutex(&self.off) {
                return;
            }
            let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
        }
    }

    /// Takes output in pieces and adds it line by line.
    pub(crate) fn lines(&self) -> LineWriter<'_> {
        LineWriter { job: self, held: Vec::new(), tail: Vec::new() }
    }
}

pub(crate) fn cancelled_failure() -> Failure {
    Failure::new(Kind::Conflict, "the build was called off")
}

/// Output that becomes lines.
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

    /// The last of it, as text.
    pub(crate) fn finish(mut self, max: usize) -> String {
        if !self.held.is_empty() {
            self.line();
        }
        let from = self.tail.len().saturating_sub(max);
        String::from_utf8_lossy(&self.tail[from..]).into_owned()
    }
}

impl Builds<'_> {
    /// Asks for a build of the template of that name, which is made if there is none.
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

    /// A build that was asked for; the caller begins it.
    pub fn begin(&self, template: &TemplateId, id: &BuildId) -> Result<Arc<BuildJob>, Failure> {
        let job = self.job(template, id)?;
        let mut log = lock_mutex(&job.log);
        if log.state != BuildState::Waiting {
            return Err(
                Failure::new(Kind::Conflict, format!("build {id} was begun already")).hint("ask for another")
            );
        }
        let pid = std::process::id() as i32;
        self.write_job(&job, None, sys::proc::start_ticks(pid).ok().map(|ticks| (pid, ticks)))?;
        let path = self.log_path(template, id);
        let file = fs::create_dir_all(path.parent().unwrap_or(&path))
            .and_then(|()| OpenOptions::new().create(true).append(true).open(&path));
        log.file = Some(file.map_err(|error| {
            Failure::new(Kind::Host, "cannot write down what the build says")
                .because(error)
                .hint("make room: pal gc")
        })?);
        log.state = BuildState::Building;
        drop(log);
        Ok(job)
    }

    /// Waits until few enough others build.
    pub async fn wait_turn(&self) -> Option<tokio::sync::OwnedSemaphorePermit> {
        self.jobs.turns.clone().acquire_owned().await.ok()
    }

    fn job(&self, template: &TemplateId, id: &BuildId) -> Result<Arc<BuildJob>, Failure> {
        let known = lock_mutex(&self.jobs.running).get(id).filter(|job| job.template == *template).cloned();
        if let Some(job) = known {
            return Ok(job);
        }
        // Asked for from a process that is gone.
        let unknown =
            || Failure::new(Kind::NotFound, format!("there is no build {id} of template {template}"));
        let key = build_key(template, id)?;
        if self.fleet.templates().build(template, id)?.is_some() {
            // It was complete, and its process ended before it had removed the job.
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
                // Another process builds it: what is known now is no longer true in a moment.
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

    /// How a build is, and what it said from a line on.
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

    /// What a build said, as far as its process came.
    fn earlier_lines(&self, template: &TemplateId, id: &BuildId) -> Vec<LogLine> {
        let Ok(file) = std::fs::File::open(self.log_path(template, id)) else { return Vec::new() };
        let lines = std::io::BufReader::new(file.take(LOG_FILE_MAX)).split(b'\n').map_while(Result::ok);
        // The last line may have been cut, also within a character.
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
    /// Calls off every build of a template.
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
