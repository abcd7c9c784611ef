//! Builds the real `base` once from Debian's packages, and checks what programs expect to find in it.
//!
//! Slow: alone, `cargo nextest run -p tests --test base`. It needs mmdebstrap or debootstrap, and Debian's mirrors.

use std::collections::HashMap;

use fleet::{BASE, BaseImage, BuildRequest, BuildStep, Create, ExecRequest, Instruction};
use proto::BodyId;
use testkit::{
    Bodies, body_test,
    registry::{CannedResponse, ScriptedServer},
};

/// A package that creates an account and a file of that account, as many packages do.
const PACKAGE: &str = r#"
    set -e; mkdir -p /tmp/p/DEBIAN /tmp/p/usr/bin; cd /tmp
    printf 'Package: greeting\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x.x>\nDescription: x\n' > p/DEBIAN/control
    printf '#!/bin/sh\nadduser --system --quiet greeter\nchown greeter /usr/bin/greeting\n' > p/DEBIAN/postinst
    printf '#!/bin/sh\necho hello\n' > p/usr/bin/greeting; chmod 755 p/DEBIAN/postinst p/usr/bin/greeting
    dpkg-deb --root-owner-group --build p greeting.deb >/dev/null
    sudo DEBIAN_FRONTEND=noninteractive apt-get install -y /tmp/greeting.deb >/dev/null 2>&1
    greeting; stat -c %U /usr/bin/greeting
"#;

/// Packages for apt, pip and npm, made in a Body: each file as its name and its contents, in one line of hex.
const PACKAGES: &str = r#"
    set -e; mkdir -p /tmp/m/d/DEBIAN /tmp/m/d/usr/bin /tmp/m/package; cd /tmp/m
    printf 'Package: mirrored\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x.x>\nDescription: x\n' > d/DEBIAN/control
    printf '#!/bin/sh\necho apt\n' > d/usr/bin/mirrored; chmod 755 d/usr/bin/mirrored
    dpkg-deb --root-owner-group --build d mirrored.deb >/dev/null
    { cat d/DEBIAN/control; printf 'Filename: ./mirrored.deb\nSize: %s\nSHA256: %s\n\n' $(stat -c %s mirrored.deb) $(sha256sum mirrored.deb | cut -d' ' -f1); } > Packages
    python3 - <<'END'
import zipfile
with zipfile.ZipFile("mirrored-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("mirrored.py", "print('pip')\n")
    wheel.writestr("mirrored-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mirrored\nVersion: 1\n")
    wheel.writestr("mirrored-1.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("mirrored-1.dist-info/RECORD", "")
END
    printf '{"name":"mirrored","version":"1.0.0","main":"i.js"}' > package/package.json; echo "console.log('npm')" > package/i.js
    tar czf mirrored.tgz package
    for file in mirrored.deb Packages mirrored-1-py3-none-any.whl mirrored.tgz; do echo $file $(od -An -v -tx1 $file | tr -d ' \n'); done
"#;

/// A mirror on this host for all three, over plain HTTP.
fn mirror(files: HashMap<String, Vec<u8>>) -> ScriptedServer {
    ScriptedServer::start(move |asked| {
        let here = &asked.headers["host"];
        let path = asked.path.trim_start_matches('/').trim_start_matches("./");
        let version = || {
            format!(
                r#"{{"name":"mirrored","version":"1.0.0","main":"i.js","dist":{{"tarball":"http://{here}/mirrored.tgz"}}}}"#
            )
        };
        match path {
            "simple/mirrored/" => CannedResponse {
                headers: vec!["Content-Type: text/html".into()],
                ..CannedResponse::ok("<a href='/mirrored-1-py3-none-any.whl'>mirrored-1-py3-none-any.whl</a>")
            },
            "mirrored" => CannedResponse::ok(format!(
                r#"{{"name":"mirrored","dist-tags":{{"latest":"1.0.0"}},"versions":{{"1.0.0":{}}}}}"#,
                version()
            )),
            path => files
                .get(path)
                .map_or_else(CannedResponse::nothing, |bytes| CannedResponse::ok(bytes.clone())),
        }
    })
}

/// apt, pip and npm of a build download through its egress proxy, as any user.
async fn packages_are_installed_by_a_build(t: &Bodies, body: &BodyId) {
    let made = t.exec(body, ExecRequest::new(["/bin/bash", "-c", PACKAGES])).await.ok();
    let decode = |text: &str| {
        (0..text.len() / 2)
            .map(|at| u8::from_str_radix(&text[2 * at..][..2], 16).unwrap())
            .collect::<Vec<u8>>()
    };
    let mirror = mirror(
        made.lines()
            .map(|line| line.split_once(' ').unwrap())
            .map(|(name, text)| (name.to_owned(), decode(text)))
            .collect(),
    );
    let port = mirror.host().replace("127.0.0.1:", "");
    let here = format!("http://localhost:{port}");
    // Clients do not use a proxy for the loopback address, so the mirror has another one.
    let run = |line: String, user: &str| BuildStep {
        act: Instruction::Run {
            command: format!("export no_proxy= NO_PROXY=; {line}"),
            user: Some(user.into()),
        },
        force: false,
    };
    let steps = vec![
        run(
            format!(
                "rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*; echo 'deb [trusted=yes] {here}/ ./' > /etc/apt/sources.list && apt-get update && apt-get install -y mirrored && mirrored"
            ),
            "root",
        ),
        run("sudo apt-get install -y --reinstall mirrored".into(), "user"),
        run(
            format!(
                "pip install --index-url {here}/simple --trusted-host localhost mirrored && python -c 'import mirrored'"
            ),
            "user",
        ),
        run(
            format!("npm install --no-audit --registry {here} mirrored && node -e \"require('mirrored')\""),
            "user",
        ),
    ];
    let request = BuildRequest {
        from: BaseImage::Template(BASE.into()),
        steps,
        start: None,
        force: false,
        allow: vec![format!("localhost:{port}+plain+private")],
    };
    let asked = t.fleet().builds().request("packages", &[], None, None).unwrap();
    let job = t.fleet().builds().begin(&asked.template, &asked.id).unwrap();
    let built = t.fleet().builds().build(&job, request).await;
    let said: Vec<String> = job.log_lines(0, usize::MAX).1.into_iter().map(|said| said.message).collect();
    assert!(built.is_ok(), "{said:#?}");
    for word in ["apt", "pip", "npm"] {
        assert!(said.iter().any(|line| line == word), "{word}: {said:#?}");
    }
}

#[body_test(except(
    user = "a root file system of its own needs subordinate ids",
    microvm = "the root file system is the same; body::templates tests microVMs with roots of their own"
))]
async fn base_is_what_programs_expect(t: Bodies) {
    let made = t
        .fleet()
        .builds()
        .setup(BASE, &mut |_| ())
        .unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)));
    assert_eq!(
        t.fleet().builds().setup(BASE, &mut |_| ()).unwrap().builds.len(),
        made.builds.len(),
        "it is made once"
    );
    let view = t.make(Create { template: BASE.into(), ..t.kept() }).await;
    let login = |line: &str| ExecRequest::new(["/bin/bash", "-l", "-c", line]);
    let ok = async |line: &str| t.exec(view.id(), login(line)).await.ok();
    assert_eq!(ok("id -un; id -u; pwd; sudo id -u").await, "user\n1000\n/home/user\n0");
    assert_eq!(ok("for name in bash python python3 pip node npm git curl sudo; do command -v $name >/dev/null || echo no $name; done").await, "");
    assert_eq!(ok("python -c 'import ssl, sqlite3, venv; print(1 + 1)'; node -e 'console.log(2 + 2)'; locale charmap").await, "2\n4\nUTF-8");
    assert_eq!(ok("cat /proc/self/uid_map | (read a b c; echo $a $c)").await, "0 65536");
    assert_eq!(ok(PACKAGE).await, "hello\ngreeter");
    assert_eq!(ok("git config --global user.email a@b && git config --global user.name a && git init -q r && cd r && touch f && git add f && git commit -qm x && git log --oneline | wc -l").await, "1");
    packages_are_installed_by_a_build(&t, view.id()).await;
}
