//! Minding a machine: from the start of its hypervisor to its end.

use std::{
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use guest::channel::{Channel, ChannelError, ChannelEvent, ChannelPort};
use proto::{
    mux::{FrameKind, MuxSide},
    vm::{
        Accelerator, BOARD, CLOCK_OFFSET_MAX_MS, GUEST_SAYS, GuestReceipt, GuestSetup, StartReport, VmPlan,
        VmStart, clock_offset_ms,
    },
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc,
    task::LocalSet,
};

use super::{
    VmmInput,
    hypervisor::{self, HypervisorDriver},
    save,
    share::VirtiofsDaemons,
    sidecar::Sidecar,
};
use crate::report::{StepError, StepExt};

/// How long a machine that was thawed may take to answer.
const THAW_PATIENCE: Duration = Duration::from_secs(20);
/// A host that is busy with others gives a machine little of its processors: time in which it wanted one and had none
/// is not counted, up to so many times what it may take.
const BUSY_MAX: u32 = 6;
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// An emulated kernel that does not come up the first time is started once more: its clock sometimes fails to be
/// calibrated.
const BOOTS_MAX: u32 = 2;
/// What the kernel is told besides when it is started once more: to write on its console what it does, from the beginning.
const TALKATIVE: &str = " loglevel=7 earlyprintk=ttyS0";
/// What the kernel writes on its console before the reason of its panic.
const PANIC: &str = "Kernel panic - not syncing: ";
/// How long its hypervisor may take to end after its guest said goodbye.
const BYE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a machine is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VmEnd {
    /// Its guest said goodbye.
    InOrder,
    /// Its hypervisor is gone.
    Hypervisor,
    /// Its guest broke a rule.
    Violation,
    /// It stopped without a word.
    Silent,
    /// Its hypervisor cannot be asked.
    Monitor,
    /// Who shares a directory with it is gone.
    Sharer,
}

impl VmEnd {
    fn code(self) -> i32 {
        match self {
            VmEnd::InOrder => 0,
            VmEnd::Hypervisor => 71,
            VmEnd::Violation => 72,
            VmEnd::Silent => 73,
            VmEnd::Monitor => 74,
            VmEnd::Sharer => 75,
        }
    }
}

/// A word that came over the line, or its end.
pub(super) type GuestWords = mpsc::Receiver<Result<(FrameKind, Vec<u8>), ChannelError>>;

/// A machine whose guest answers.
pub(super) struct RunningVm {
    pub(super) vm: VmPlan,
    pub(super) channel: Rc<Channel>,
    pub(super) words: GuestWords,
    pub(super) engine: Box<dyn HypervisorDriver>,
    /// Answers to `Hold` that nobody waited for to the end, and that may still come.
    pub(super) late: u32,
}

pub fn run(input: VmmInput, tell: impl FnOnce(Result<StartReport, StepError>)) -> i32 {
    let _ = sys::process::set_name(c"pal-vm");
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_millis(500))
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(Err(error).step("prepare to mind the machine"));
            return 1;
        }
    };
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let VmmInput { vm, callers, control, sharers, jailer } = input;
        let mut sharers = VirtiofsDaemons::of(sharers);
        let (callers, control) = match listen(callers).and_then(|callers| Ok((callers, listen(control)?))) {
            Ok(listening) => listening,
            Err(error) => {
                tell(Err(error).step("listen for callers"));
                return 1;
            }
        };
        let brought_up = tokio::select! {
            up = start_vm(vm, jailer) => up,
            why = sharers.gone() => Err(StepError::new("share a directory with the machine", why)),
        };
        let (mut machine, revival) = match brought_up {
            Ok(up) => up,
            Err(error) => {
                tell(Err(error));
                return 1;
            }
        };
        match machine.engine.process().handle().step("follow the hypervisor") {
            Ok(handle) => {
                tell(Ok(revival));
                tokio::select! {
                    over = serve_until_end(&mut machine, handle, callers, control) => over.code(),
                    why = sharers.gone() => {
                        log_problem(&format!("virtiofsd is gone: {why}"));
                        VmEnd::Sharer.code()
                    }
                }
            }
            Err(error) => {
                tell(Err(error));
                1
            }
        }
    })
}

fn listen(listener: std::os::unix::net::UnixListener) -> io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Starts the machine and waits for its guest.
async fn start_vm(
    mut vm: VmPlan,
    mut jailer: Option<Sidecar>,
) -> Result<(RunningVm, StartReport), StepError> {
    // Who shares directories is there for one hypervisor.
    let boots = matches!(vm.begin, VmStart::Boot { .. })
        && vm.accelerator == Accelerator::Emulated
        && vm.shares.is_empty();
    let mut attempt = 1;
    loop {
        match try_start(vm.clone(), jailer.take()).await {
            Err(VmStartFailure { silent: true, .. }) if boots && attempt < BOOTS_MAX => {
                attempt += 1;
                if let VmStart::Boot { cmdline, .. } = &mut vm.begin {
                    cmdline.push_str(TALKATIVE);
                }
            }
            outcome => return outcome.map_err(|failure| failure.error),
        }
    }
}

struct VmStartFailure {
    error: StepError,
    /// The machine runs, but says nothing.
    silent: bool,
}

impl From<StepError> for VmStartFailure {
    fn from(error: StepError) -> Self {
        Self { error, silent: false }
    }
}

async fn try_start(vm: VmPlan, jailer: Option<Sidecar>) -> Result<(RunningVm, StartReport), VmStartFailure> {
    let began = Instant::now();
    let mut engine = hypervisor::start(&vm, jailer).await?;
    let (how, patience) = match &vm.begin {
        VmStart::Boot { .. } => ("boot", Duration::from_millis(vm.boot_ms_max)),
        VmStart::Thaw { .. } => ("thaw", THAW_PATIENCE),
    };
    let line = match engine.begin(&vm).await {
        Ok(line) => line,
        Err(error) if how == "thaw" => {
            return Err(incomplete(&format!("its hypervisor cannot go on with it: {error}")).into());
        }
        Err(error) => return Err(start_failure(engine.as_mut(), error).await),
    };
    let channel = Channel::new(MuxSide::Host, ChannelPort::new(line).step("open the line to the machine")?);
    let writing = channel.clone();
    tokio::task::spawn_local(async move { drop(writing.write().await) });
    let words = receive_words(&channel);
    let mut machine = RunningVm { vm, channel, words, engine, late: 0 };
    if how == "boot"
        && let Err(error) = machine.first_word(FrameKind::Here, patience).await
    {
        return Err(start_failure(machine.engine.as_mut(), error).await);
    }
    let revival = match machine.set_up_guest(how, patience, began).await {
        Ok(revival) => revival,
        Err(error) if how == "thaw" => {
            return Err(incomplete(&format!("its guest does not answer: {error}")).into());
        }
        Err(error) => return Err(start_failure(machine.engine.as_mut(), error).await),
    };
    if how == "boot"
        && let Err(error) = machine.engine.end_with_guest().await
    {
        return Err(start_failure(machine.engine.as_mut(), error).await);
    }
    match unproven_part(&machine.vm, &revival) {
        Some(what) if how == "thaw" => Err(incomplete(&what).into()),
        Some(what) => Err(StepError::new("bring the machine up", what).into()),
        None => Ok((machine, revival)),
    }
}

/// What a receipt does not prove.
pub(super) fn unproven_part(vm: &VmPlan, revival: &StartReport) -> Option<String> {
    let StartReport { receipt, clock_offset_ms, .. } = revival;
    if receipt.body != vm.welcome.config.body {
        return Some("its guest takes itself for another Body's".to_owned());
    }
    if receipt.generation != vm.welcome.generation {
        return Some(format!(
            "its guest is of generation {}, not {}",
            receipt.generation, vm.welcome.generation
        ));
    }
    if !receipt.tree.is_sound() {
        return Some("its guest does not say what its files are".to_owned());
    }
    if !receipt.reseeded {
        return Some(format!("its kernel took no fresh randomness: {}", receipt_problems(receipt)));
    }
    if clock_offset_ms.abs() > CLOCK_OFFSET_MAX_MS {
        return Some(format!("its clock is {clock_offset_ms} ms off"));
    }
    match &vm.begin {
        // Where processes went on meanwhile, they may have changed files of their own.
        VmStart::Thaw { held, .. } if held.still && held.tree != receipt.tree => {
            Some("its files are not those it was frozen with".to_owned())
        }
        _ => None,
    }
}

fn receipt_problems(receipt: &GuestReceipt) -> String {
    proto::text::visible(&receipt.trouble.join("; ").chars().take(400).collect::<String>())
}

/// The words of a line, as they come; streams look after themselves.
fn receive_words(channel: &Rc<Channel>) -> GuestWords {
    let (words, heard) = mpsc::channel(16);
    let channel = channel.clone();
    tokio::task::spawn_local(async move {
        loop {
            let told = match channel.read().await {
                Ok(ChannelEvent::Word(kind, contents)) => Ok((kind, contents)),
                // A guest opens no streams; the line would have ended.
                Ok(ChannelEvent::Opened(_)) => continue,
                Err(error) => Err(error),
            };
            let over = told.is_err();
            if words.send(told).await.is_err() || over {
                return;
            }
        }
    });
    heard
}

/// Time and randomness of this very moment.
fn with_time_and_randomness(welcome: &GuestSetup) -> io::Result<GuestSetup> {
    let drawn: [u8; 64] = sys::random::bytes()?;
    Ok(GuestSetup { now_ns: now_ns(), entropy: proto::event::hex(&drawn), ..welcome.clone() })
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// A machine that did not come up, with the end of its console.
async fn start_failure(engine: &mut dyn HypervisorDriver, error: io::Error) -> VmStartFailure {
    let silent = error.kind() == io::ErrorKind::TimedOut;
    let console = engine.console().await.unwrap_or_default();
    let error = StepError::new("boot the machine", explain_boot(&error, &console));
    VmStartFailure {
        error: error.hint("try the kernel that is set up, or another one: pal setup microvm"),
        silent,
    }
}

/// Why a machine did not come up: what its guest or its kernel says of it, and the console.
fn explain_boot(error: &io::Error, console: &[String]) -> String {
    let after = |mark: &str| {
        console.iter().rev().find_map(|line| line.split_once(mark)).map(|(_, said)| said.trim().to_owned())
    };
    let why = after(GUEST_SAYS)
        .map(|said| format!("the guest gave up: {said}"))
        .or_else(|| {
            after(PANIC)
                .map(|said| format!("the guest's kernel panicked: {}", said.trim_end_matches(" ]---")))
        })
        .unwrap_or_else(|| match error.kind() {
            io::ErrorKind::TimedOut => "the guest did not answer in time".to_owned(),
            _ => error.to_string(),
        });
    match console.is_empty() {
        true => format!("{why}; the guest's console is empty"),
        false => format!("{why}\nthe guest's console ends with:\n{}", console.join("\n")),
    }
}

async fn next_word(words: &mut GuestWords, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
    let heard = async {
        loop {
            match words.recv().await {
                Some(Ok((kind, contents))) if kind == wanted => return Ok(contents),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(io::Error::other(error)),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    };
    tokio::time::timeout(patience, heard).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

fn incomplete(what: &str) -> StepError {
    StepError::new("thaw the machine", format!("{}: {what}", proto::failure::RESTORE_INCOMPLETE))
        .restore_incomplete()
}

impl RunningVm {
    /// Waits for a word; others that come first are of no interest.
    pub(super) async fn wait_word(&mut self, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
        next_word(&mut self.words, wanted, patience).await
    }

    /// Tells its guest who it is from now on, and hears what that proves.
    pub(super) async fn set_up_guest(
        &mut self,
        how: &str,
        patience: Duration,
        began: Instant,
    ) -> io::Result<StartReport> {
        let mut welcome = with_time_and_randomness(&self.vm.welcome)?;
        if matches!(self.vm.begin, VmStart::Thaw { .. }) {
            // Its files are there; what it need not hear it need not understand.
            welcome.seeds = Vec::new();
            welcome.images = Vec::new();
        }
        self.channel.send_word(FrameKind::Welcome, &serde_json::to_vec(&welcome)?).await;
        let word = self.first_word(FrameKind::Receipt, patience).await?;
        let receipt = serde_json::from_slice::<GuestReceipt>(&word)?.bounded();
        Ok(StartReport {
            how: how.to_owned(),
            clock_offset_ms: clock_offset_ms(&receipt, welcome.now_ns, now_ns()),
            took_ms: began.elapsed().as_millis() as u64,
            board: BOARD,
            receipt,
        })
    }

    /// Waits for a word of a machine that comes up, until it has had the time that it may take.
    async fn first_word(&mut self, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
        let (began, before) = (Instant::now(), self.engine.process().busy());
        let (mut looked, mut willing) = (began, Duration::ZERO);
        loop {
            let stopped = {
                let Self { words, engine, .. } = self;
                tokio::select! {
                    biased;
                    heard = next_word(words, wanted, LOOK_EVERY) => match heard {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => None,
                        heard => return heard,
                    },
                    stopped = engine.wait_stopped() => Some(stopped),
                }
            };
            if let Some(stopped) = stopped {
                return stopped.and_then(|()| Err(io::Error::other("the guest stopped its machine")));
            }
            let since = looked.elapsed();
            looked += since;
            let process = self.engine.process();
            if process.wants_processor() {
                willing += since;
            }
            let starved = willing.saturating_sub(process.busy().saturating_sub(before));
            if began.elapsed() > patience * BUSY_MAX || began.elapsed().saturating_sub(starved) > patience {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Its guest said goodbye: the hypervisor follows.
    async fn wait_hypervisor_exit(&mut self) {
        let _ = tokio::time::timeout(BYE_PATIENCE, self.engine.stop()).await;
        let deadline = Instant::now() + BYE_PATIENCE;
        while self.engine.process().ended().is_none() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Joins callers to the guest until the machine is over.
async fn serve_until_end(
    machine: &mut RunningVm,
    handle: OwnedFd,
    callers: UnixListener,
    control: UnixListener,
) -> VmEnd {
    let Ok(gone) = guest::channel::readable(handle) else { return VmEnd::Monitor };
    let channel = machine.channel.clone();
    tokio::task::spawn_local(async move {
        loop {
            match callers.accept().await {
                Ok((socket, _)) => drop(channel.open(socket).await),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    });
    loop {
        tokio::select! {
            word = machine.words.recv() => match word {
                Some(Ok((FrameKind::Bye, _))) => {
                    machine.wait_hypervisor_exit().await;
                    return VmEnd::InOrder;
                }
                // Somebody gave up waiting for it.
                Some(Ok((FrameKind::Held, _))) => machine.late = machine.late.saturating_sub(1),
                Some(Ok(_)) => {}
                Some(Err(ChannelError::Violation(violation))) => {
                    log_problem(&format!("the guest broke a rule: {violation}"));
                    return VmEnd::Violation;
                }
                Some(Err(ChannelError::Broken(_))) | None => {
                    machine.wait_hypervisor_exit().await;
                    return if ended_by_signal(machine) { VmEnd::Hypervisor } else { VmEnd::Silent };
                }
            },
            _ = gone.readable() => return if ended_by_signal(machine) { VmEnd::Hypervisor } else { VmEnd::Silent },
            asked = control.accept() => {
                if let Ok((socket, _)) = asked && let Err(error) = answer(machine, socket).await {
                    log_problem(&format!("the machine cannot go on after it was frozen: {error}"));
                    return VmEnd::Monitor;
                }
            }
        }
    }
}

fn ended_by_signal(machine: &mut RunningVm) -> bool {
    machine.engine.process().ended().is_none_or(|status| status.exit_status() != Some(0))
}

async fn answer(machine: &mut RunningVm, socket: UnixStream) -> io::Result<()> {
    save::answer(machine, socket).await
}

/// To the Body's log.
fn log_problem(what: &str) {
    let _ = io::Write::write_all(&mut io::stderr(), format!("pal-vm: {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_that_failed_says_why_and_shows_the_console() {
        let broke = io::Error::other("the line broke");
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let console =
            lines("virtio: Unknown symbol x (err -2)\npal-guest: the kernel refuses the module virtio");
        assert_eq!(
            explain_boot(&broke, &console),
            "the guest gave up: the kernel refuses the module virtio\nthe guest's console ends with:\n\
             virtio: Unknown symbol x (err -2)\npal-guest: the kernel refuses the module virtio"
        );
        let console = lines("[    1.0] ---[ end Kernel panic - not syncing: no root ]---");
        assert!(explain_boot(&broke, &console).starts_with("the guest's kernel panicked: no root\n"));
        assert_eq!(explain_boot(&broke, &[]), "the line broke; the guest's console is empty");
        let late = io::Error::from(io::ErrorKind::TimedOut);
        assert_eq!(
            explain_boot(&late, &lines("x")),
            "the guest did not answer in time\nthe guest's console ends with:\nx"
        );
    }
}
