//! The VMM process: supervises a microVM from the start of its hypervisor to its end.

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
    sidecar::Sidecar,
    virtiofs_daemons::VirtiofsDaemons,
};
use crate::report::{StepError, StepExt};

/// How long a restored guest may take to answer.
const THAW_PATIENCE: Duration = Duration::from_secs(20);
/// On a busy host a microVM gets little CPU time. Time in which it was ready to run but did not is not counted, up to
/// this multiple of its limit.
const BUSY_MAX: u32 = 6;
/// How often the CPU time is checked.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// An emulated kernel that does not come up is booted once more, because its clock calibration sometimes fails.
const BOOTS_MAX: u32 = 2;
/// Kernel parameters of the second boot: log everything on the console, from the beginning.
const TALKATIVE: &str = " loglevel=7 earlyprintk=ttyS0";
/// The kernel's console text before the reason of a panic.
const PANIC: &str = "Kernel panic - not syncing: ";
/// How long the hypervisor may take to end after its guest announced its end.
const BYE_PATIENCE: Duration = Duration::from_secs(5);

/// The reason why a microVM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VmEnd {
    /// Its guest announced its end.
    InOrder,
    /// A signal ended its hypervisor.
    Hypervisor,
    /// Its guest violated the protocol.
    Violation,
    /// It stopped without an announcement.
    Silent,
    /// Its hypervisor does not answer.
    Monitor,
    /// A virtiofsd of it has ended.
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

/// A control message that came over the channel, or the end of the channel.
pub(super) type GuestWords = mpsc::Receiver<Result<(FrameKind, Vec<u8>), ChannelError>>;

/// A microVM whose guest answers.
pub(super) struct RunningVm {
    pub(super) vm: VmPlan,
    pub(super) channel: Rc<Channel>,
    pub(super) words: GuestWords,
    pub(super) engine: Box<dyn HypervisorDriver>,
    /// Answers to `Hold` that timed out and may still arrive.
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
            tell(Err(error).step("prepare the VMM process"));
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
            why = sharers.gone() => Err(StepError::new("share a directory with the microVM", why)),
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
                        log_problem(&format!("virtiofsd has ended: {why}"));
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

/// Starts the microVM and waits for its guest.
async fn start_vm(
    mut vm: VmPlan,
    mut jailer: Option<Sidecar>,
) -> Result<(RunningVm, StartReport), StepError> {
    // A virtiofsd serves one hypervisor only, so there is no second attempt.
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
    /// The microVM runs, but its guest does not answer.
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
            return Err(incomplete(&format!("its hypervisor cannot load the snapshot: {error}")).into());
        }
        Err(error) => return Err(start_failure(engine.as_mut(), error).await),
    };
    let channel = Channel::new(MuxSide::Host, ChannelPort::new(line).step("open the channel to the guest")?);
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
        Some(what) => Err(StepError::new("start the microVM", what).into()),
        None => Ok((machine, revival)),
    }
}

/// A description of what the receipt does not prove, if anything.
pub(super) fn unproven_part(vm: &VmPlan, revival: &StartReport) -> Option<String> {
    let StartReport { receipt, clock_offset_ms, .. } = revival;
    if receipt.body != vm.welcome.config.body {
        return Some("its guest reports the id of another Body".to_owned());
    }
    if receipt.generation != vm.welcome.generation {
        return Some(format!(
            "its guest reports generation {}, not {}",
            receipt.generation, vm.welcome.generation
        ));
    }
    if !receipt.tree.is_sound() {
        return Some("its guest sent no digest of its files".to_owned());
    }
    if !receipt.reseeded {
        return Some(format!("its kernel was not reseeded: {}", receipt_problems(receipt)));
    }
    if clock_offset_ms.abs() > CLOCK_OFFSET_MAX_MS {
        return Some(format!("its clock is {clock_offset_ms} ms off"));
    }
    match &vm.begin {
        // If processes ran on while the snapshot was taken, they may have changed files.
        VmStart::Thaw { held, .. } if held.still && held.tree != receipt.tree => {
            Some("its files differ from those in the snapshot".to_owned())
        }
        _ => None,
    }
}

fn receipt_problems(receipt: &GuestReceipt) -> String {
    proto::text::visible(&receipt.trouble.join("; ").chars().take(400).collect::<String>())
}

/// Forwards the control messages of the channel as they come; the channel handles streams itself.
fn receive_words(channel: &Rc<Channel>) -> GuestWords {
    let (words, receiver) = mpsc::channel(16);
    let channel = channel.clone();
    tokio::task::spawn_local(async move {
        loop {
            let told = match channel.read().await {
                Ok(ChannelEvent::Word(kind, contents)) => Ok((kind, contents)),
                // Only the host opens streams; an open by the guest would have ended the channel.
                Ok(ChannelEvent::Opened(_)) => continue,
                Err(error) => Err(error),
            };
            let over = told.is_err();
            if words.send(told).await.is_err() || over {
                return;
            }
        }
    });
    receiver
}

/// Adds the current time and new randomness to a setup.
fn with_time_and_randomness(welcome: &GuestSetup) -> io::Result<GuestSetup> {
    let entropy: [u8; 64] = sys::random::bytes()?;
    Ok(GuestSetup { now_ns: now_ns(), entropy: proto::event::hex(&entropy), ..welcome.clone() })
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// The error of a microVM that did not come up, with the end of its console.
async fn start_failure(engine: &mut dyn HypervisorDriver, error: io::Error) -> VmStartFailure {
    let silent = error.kind() == io::ErrorKind::TimedOut;
    let console = engine.console().await.unwrap_or_default();
    let error = StepError::new("boot the microVM", explain_boot(&error, &console));
    VmStartFailure {
        error: error.hint("try the kernel that is set up, or another one: pal setup microvm"),
        silent,
    }
}

/// Explains a failed boot: the message of the guest or its kernel, and the console.
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
    let receiver = async {
        loop {
            match words.recv().await {
                Some(Ok((kind, contents))) if kind == wanted => return Ok(contents),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(io::Error::other(error)),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    };
    tokio::time::timeout(patience, receiver).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

fn incomplete(what: &str) -> StepError {
    StepError::new("restore the microVM", format!("{}: {what}", proto::failure::RESTORE_INCOMPLETE))
        .restore_incomplete()
}

impl RunningVm {
    /// Waits for a control message; others that come first are skipped.
    pub(super) async fn wait_word(&mut self, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
        next_word(&mut self.words, wanted, patience).await
    }

    /// Sends the guest its identity, and reads its receipt.
    pub(super) async fn set_up_guest(
        &mut self,
        how: &str,
        patience: Duration,
        began: Instant,
    ) -> io::Result<StartReport> {
        let mut welcome = with_time_and_randomness(&self.vm.welcome)?;
        if matches!(self.vm.begin, VmStart::Thaw { .. }) {
            // A guest that was set up before has its files already, so they are not sent again.
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

    /// Waits for the first control message of a microVM until it has had the CPU time that it may take.
    async fn first_word(&mut self, wanted: FrameKind, patience: Duration) -> io::Result<Vec<u8>> {
        let (began, before) = (Instant::now(), self.engine.process().busy());
        let (mut looked, mut willing) = (began, Duration::ZERO);
        loop {
            let stopped = {
                let Self { words, engine, .. } = self;
                tokio::select! {
                    biased;
                    receiver = next_word(words, wanted, LOOK_EVERY) => match receiver {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => None,
                        receiver => return receiver,
                    },
                    stopped = engine.wait_stopped() => Some(stopped),
                }
            };
            if let Some(stopped) = stopped {
                return stopped.and_then(|()| Err(io::Error::other("the guest stopped its microVM")));
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

    /// Called after the guest announced its end: waits until the hypervisor has ended.
    async fn wait_hypervisor_exit(&mut self) {
        let _ = tokio::time::timeout(BYE_PATIENCE, self.engine.stop()).await;
        let deadline = Instant::now() + BYE_PATIENCE;
        while self.engine.process().ended().is_none() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Connects callers to the guest until the microVM ends.
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
                // The answer to a request that timed out.
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
                    log_problem(&format!("the microVM cannot continue after it was saved: {error}"));
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

/// Writes a line to the Body's log.
fn log_problem(what: &str) {
    let _ = io::Write::write_all(&mut io::stderr(), format!("pal-vm: {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_that_failed_says_why_and_shows_the_console() {
        let broke = io::Error::other("the channel broke");
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
        assert_eq!(explain_boot(&broke, &[]), "the channel broke; the guest's console is empty");
        let late = io::Error::from(io::ErrorKind::TimedOut);
        assert_eq!(
            explain_boot(&late, &lines("x")),
            "the guest did not answer in time\nthe guest's console ends with:\nx"
        );
    }
}
