//! Kernels of apt boot, whatever order their modules need; a kernel that does not boot changes nothing.

use std::{
    cmp::Ordering,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use body::vm::MicrovmInstall;
use fleet::{Create, CustomKernel};
use proto::{Kind, MechanismStatus};
use testkit::{Bodies, body_test, explain, skip::skip};

/// Parts of the setup that a test shares with all others; the rest is its own.
const SHARED: [&str; 6] = ["images", "uppers", "engine-", "kernel-", "sharing-", "redirect-"];

/// Gives the test a setup of its own that begins as a copy of the shared one.
pub fn own_setup(t: &Bodies) -> PathBuf {
    let own = t.data().join("vm");
    let shared = fs::canonicalize(&own).unwrap();
    fs::remove_file(&own).unwrap();
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o700)).unwrap();
    for entry in fs::read_dir(&shared).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if SHARED.iter().any(|begins| name.starts_with(begins)) {
            symlink(entry.path(), own.join(name)).unwrap();
        } else if name.ends_with(".json") {
            fs::copy(entry.path(), own.join(name)).unwrap();
        }
    }
    own
}

/// The output of a command.
fn output_of(program: &str, arguments: &[&str], dir: &Path) -> String {
    let output = Command::new(program).args(arguments).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Compares names by the numbers in them: `6.1.0-9` comes before `6.1.0-10`.
fn compare_versions(one: &str, other: &str) -> Ordering {
    let numbers = |name: &str| -> Vec<u64> {
        name.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
    };
    numbers(one).cmp(&numbers(other))
}

/// The newest kernel package of each series that apt has, such as 6.1 and 6.12, and the oldest of all.
fn choose_packages() -> Vec<String> {
    let apt = Path::new("/usr/bin/apt-cache");
    if !apt.exists() {
        return Vec::new();
    }
    let pattern = "^linux-image-[0-9]+[.][0-9]+[.].*-cloud-amd64$";
    let found = output_of("apt-cache", &["search", "--names-only", pattern], Path::new("/"));
    let mut packages: Vec<String> =
        found.lines().filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect();
    packages.sort_by(|one, other| compare_versions(one, other));
    let series = |package: &String| package.split('.').take(2).collect::<Vec<_>>().join(".");
    let is_last =
        |index: usize| packages.get(index + 1).is_none_or(|next| series(next) != series(&packages[index]));
    let chosen = packages.iter().enumerate().filter(|(index, _)| *index == 0 || is_last(*index));
    chosen.map(|(_, package)| package.clone()).collect()
}

/// Downloads a package, once for all tests, and unpacks it.
fn fetch_kernel(t: &Bodies, package: &str) -> CustomKernel {
    let cache = std::env::current_exe()
        .unwrap()
        .ancestors()
        .find(|dir| dir.ends_with("target"))
        .map_or_else(|| t.dir().to_owned(), |target| target.join("microvm/kernels"));
    let place = cache.join(package);
    fs::create_dir_all(&place).unwrap();
    let find =
        || fs::read_dir(&place).unwrap().flatten().map(|entry| entry.path()).find(|path| path.is_file());
    let file = find().unwrap_or_else(|| {
        let part = t.dir().join(format!("{package}.part"));
        fs::create_dir(&part).unwrap();
        output_of("apt-get", &["download", "-qq", "-o", "APT::Sandbox::User=root", package], &part);
        let fetched = fs::read_dir(&part).unwrap().next().unwrap().unwrap().path();
        let kept = place.join(fetched.file_name().unwrap());
        fs::copy(&fetched, kept.with_extension("part")).unwrap();
        fs::rename(kept.with_extension("part"), &kept).unwrap();
        kept
    });
    let tree = t.dir().join(package);
    output_of("dpkg-deb", &["-x", file.to_str().unwrap(), tree.to_str().unwrap()], t.dir());
    let only = |dir: PathBuf, begins: &str| {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(begins))
    };
    let modules = only(tree.join("lib/modules"), "").or_else(|| only(tree.join("usr/lib/modules"), ""));
    CustomKernel { file: only(tree.join("boot"), "vmlinuz").unwrap(), modules }
}

fn release_of(kernel: &CustomKernel) -> String {
    kernel.modules.as_ref().unwrap().file_name().unwrap().to_str().unwrap().to_owned()
}

/// Boots a Body and prints the release of its kernel.
async fn uname(t: &Bodies) -> String {
    let view = t.fleet().create(Create { cold: true, ..t.kept() }).await;
    let view = view.unwrap_or_else(|failure| panic!("{}", explain(&failure)));
    let said = t.sh(view.id(), "uname -r").await.ok();
    t.fleet().remove(view.id(), fleet::Force::Yes).await.unwrap();
    said
}

/// The finding of `pal doctor` about microVMs.
async fn doctor(t: &Bodies) -> fleet::DoctorFinding {
    let doctor = t.fleet().doctor().await.unwrap();
    doctor.findings.into_iter().find(|finding| finding.name == "microvm").unwrap()
}

/// The kernel files of a setup.
fn kernels_in(setup: &Path) -> Vec<String> {
    let mut names: Vec<String> = [setup.to_owned(), setup.join("initrd")]
        .iter()
        .flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("kernel-"))
        .collect();
    names.sort();
    names
}

#[body_test(except(process = "it tests microVMs"))]
async fn every_kernel_that_apt_has_boots(t: Bodies) {
    let packages = choose_packages();
    if packages.len() < 2 {
        return skip("with two kernels of apt");
    }
    own_setup(&t);
    let mut booted = 0;
    for package in packages {
        let kernel = fetch_kernel(&t, &package);
        let release = release_of(&kernel);
        let report = match t.fleet().microvms().setup(Some(kernel), &mut |said: &str| eprintln!("{said}")) {
            Ok(report) => report,
            // A kernel may have a bug of its own: then it boots, reports its release, and fails the self-test
            // after that.
            Err(failure) => {
                let why = explain(&failure);
                assert!(
                    why.contains("self-test") && why.contains(&format!("and said: {release}")),
                    "{package}: {why}"
                );
                continue;
            }
        };
        booted += 1;
        assert_eq!(report.last_boot.release, release, "the command ran in that kernel");
        assert_eq!(uname(&t).await, release, "and every microVM after it has that kernel");
        let finding = doctor(&t).await;
        assert!(
            finding.state == MechanismStatus::Enforced
                && finding.detail.contains(&format!("the kernel {release} booted at ")),
            "{finding:?}"
        );
    }
    assert!(booted >= 2, "{booted} of the kernels of apt work");
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_kernel_that_does_not_boot_leaves_the_one_before(t: Bodies) {
    let packages = choose_packages();
    if packages.len() < 2 {
        return skip("with two kernels of apt");
    }
    let own = own_setup(&t);
    let (setup, kernels) = (MicrovmInstall::of(&t.data()).setup().unwrap(), kernels_in(&own));
    let (one, other) = (fetch_kernel(&t, &packages[0]), fetch_kernel(&t, &packages[packages.len() - 1]));
    let try_kernel = |file: &Path, modules: Option<&Path>| {
        let kernel = CustomKernel { file: file.to_owned(), modules: modules.map(Path::to_owned) };
        let failure = t.fleet().microvms().setup(Some(kernel), &mut |_: &str| ()).unwrap_err();
        let now = MicrovmInstall::of(&t.data()).setup().unwrap();
        assert_eq!(now, setup, "the kernel before stays in use: {}", explain(&failure));
        assert_eq!(kernels_in(&own), kernels, "and nothing is left of the other: {}", explain(&failure));
        failure
    };
    let before = setup.kernel_source.clone();

    // Modules of another kernel, which the guest cannot load: it reports that on its console, and ends at
    // once.
    let failure = try_kernel(&one.file, other.modules.as_deref());
    assert_eq!(failure.kind, Kind::Host);
    assert!(
        failure.message.contains(&format!("does not boot; the kernel {before} stays in use")),
        "{}",
        explain(&failure)
    );
    let causes = failure.causes().join("\n");
    assert!(causes.contains("the guest gave up: the kernel refuses the module "), "{causes}");
    let (_, console) = causes.split_once("the guest's console ends with:\n").unwrap();
    let says = ["disagrees about version of symbol", "version magic"];
    assert!(console.lines().count() >= 2 && says.iter().any(|said| console.contains(said)), "{console}");

    // A kernel that finds no init, and panics.
    let panics = t.dir().join("panics");
    let mut bytes = fs::read(MicrovmInstall::of(&t.data()).kernel(&setup)).unwrap();
    let places: Vec<usize> =
        bytes.windows(6).enumerate().filter(|(_, at)| *at == b"/init\0").map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the kernel names its first program");
    places.iter().for_each(|at| bytes[*at..at + 5].copy_from_slice(b"/none"));
    fs::write(&panics, bytes).unwrap();
    let failure = try_kernel(&panics, None);
    let causes = failure.causes().join("\n");
    assert!(causes.contains("the guest's kernel panicked: "), "{causes}");
    let (_, console) = causes.split_once("the guest's console ends with:\n").unwrap();
    assert!((2..=20).contains(&console.lines().count()), "{console}");

    // A program that is no kernel, although it looks like one: the hypervisor reports that.
    let failure = try_kernel(Path::new("/proc/self/exe"), None);
    assert!(failure.message.contains("stays in use"), "{}", explain(&failure));
    assert!(failure.causes().iter().any(|cause| cause.contains("kernel")), "{}", explain(&failure));

    // A kernel without a required driver is not even booted.
    let modules = one.modules.as_deref().unwrap();
    let lost = output_of("find", &[modules.to_str().unwrap(), "-name", "virtio_blk.ko*"], t.dir());
    fs::remove_file(lost.trim()).unwrap();
    let failure = try_kernel(&one.file, Some(modules));
    assert_eq!(failure.kind, Kind::Usage);
    assert!(failure.message.contains("the kernel has no driver virtio_blk: "), "{}", explain(&failure));

    let release = uname(&t).await;
    assert!(doctor(&t).await.detail.contains(&format!("the kernel {release} booted at ")));
}

/// `pal doctor` does not call a kernel usable that changed after the setup, and a failed boot says why.
#[body_test(except(process = "it tests microVMs"))]
async fn what_was_not_seen_to_boot_is_not_called_usable(t: Bodies) {
    let own = own_setup(&t);
    uname(&t).await;
    assert_eq!(doctor(&t).await.state, MechanismStatus::Enforced, "the control: it was seen to boot");
    let mut boot = MicrovmInstall::of(&t.data()).last_boot().unwrap();
    boot.kernel = "kernel-other".to_owned();
    MicrovmInstall::of(&t.data()).record_boot(&boot).unwrap();
    let finding = doctor(&t).await;
    assert!(
        finding.state == MechanismStatus::Absent
            && finding.detail.contains("was not seen to boot")
            && finding.detail.contains(&format!("last seen: the kernel {} booted at ", boot.release))
            && finding.fix.as_deref() == Some("pal setup microvm"),
        "{finding:?}"
    );
    fs::remove_file(own.join("last-boot.json")).unwrap();
    let doctor = t.fleet().doctor().await.unwrap();
    let layer = doctor.layers.iter().find(|report| report.layer == proto::Layer::Microvm).unwrap();
    assert!(!layer.usable && layer.lacks[0].contains("was not seen to boot"), "{layer:?}");
}
