//! Skips: which ones the suite expects, and on which hosts.

/// A test that cannot run on some hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Skip {
    /// The skipped check.
    pub what: &'static str,
    /// The reason, and where it is tested instead.
    pub why: &'static str,
}

/// Every allowed skip. A test that skips for another reason fails.
pub const EXPECTED: &[Skip] = &[
    Skip { what: "as an ordinary user", why: "the whole suite runs as one already" },
    Skip { what: "for root", why: "the suite runs it as an ordinary user" },
    Skip {
        what: "under a real firecracker",
        why: "none is on this host; one is found where programs are, or named by PAL_FIRECRACKER",
    },
    Skip {
        what: "under a real jailer",
        why: "Firecracker or its jailer is not on this host; they are found where programs are, or named by PAL_FIRECRACKER and PAL_JAILER",
    },
    Skip {
        what: "under a real cloud-hypervisor",
        why: "none is on this host; one is found where programs are, or named by PAL_CLOUD_HYPERVISOR",
    },
    Skip { what: "with a KVM that makes machines", why: "/dev/kvm does not open on this host" },
    Skip {
        what: "with a KVM that tells a machine's state",
        why: "/dev/kvm of this host makes machines, but their processors' state cannot be had",
    },
    Skip {
        what: "against firecracker's description",
        why: "it is not in this repository; name its firecracker.yaml by PAL_FIRECRACKER_OPENAPI",
    },
    Skip {
        what: "against cloud-hypervisor's description",
        why: "it is not in this repository; name its cloud-hypervisor.yaml by PAL_CLOUD_HYPERVISOR_OPENAPI",
    },
    Skip {
        what: "without subordinate ids",
        why: "this user has some; started by root, the suite makes a user who has none",
    },
    Skip {
        what: "what data directories that are gone have left",
        why: "the suite runs in a pid namespace of its own, from where nobody sees all processes of the host",
    },
    Skip {
        what: "with two kernels of apt",
        why: "apt is not on this host, or its lists name fewer than two kernels for clouds",
    },
    Skip {
        what: "with a name of this host",
        why: "/etc/hosts gives 127.0.0.1 no name but localhost, which a Body has of its own",
    },
    Skip { what: "as root", why: "the suite was started by an ordinary user" },
];

/// Records that something is skipped on this host, in the test's output and in the file from which `./test`
/// makes a summary. Panics if the skip is not expected.
pub fn skip(what: &str) {
    let found = EXPECTED.iter().find(|skip| skip.what == what);
    let Some(skip) = found else { panic!("a skip that the suite does not expect: {what}") };
    eprintln!("skipped {}: {}", skip.what, skip.why);
    if let Some(list) = std::env::var_os("TESTKIT_SKIPS") {
        let test = std::thread::current().name().unwrap_or("?").to_owned();
        let line = format!("{}: {}\t{test}\n", skip.what, skip.why);
        let mut list = std::fs::File::options()
            .append(true)
            .create(true)
            .open(list)
            .expect("the list of skips can be written");
        std::io::Write::write_all(&mut list, line.as_bytes()).expect("the list of skips can be written");
    }
}
