//! Images of registries: pulled, verified, unpacked; and registries that lie.

use std::sync::Mutex;

use fleet::{
    BaseImage, BuildRequest, BuildStep, Create, ExecRequest, GcMode, Image, ImageProfile, Instruction,
    PrivateAddresses, RegistryAccess, RegistryCredentials,
};
use proto::{Event, Failure, Kind, event_data::ImagePulled, template::TemplateSettings};
use serde_json::json;
use testkit::{
    Bodies, body_test,
    registry::{
        self, CannedResponse, INDEX, ImageLayer, ImageParts, MANIFEST, RecordedRequest, ScriptedServer, TAR,
        TestRegistry, digest, image,
    },
    roots, run_as_account,
};

const GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

async fn import(t: &Bodies, name: &str, image: &Image) -> Result<Vec<String>, Failure> {
    let mut said = Vec::new();
    t.fleet()
        .builds()
        .import_image(name, image, TemplateSettings::default(), &mut |line| said.push(line.to_owned()))
        .await?;
    Ok(said)
}

fn fine<T>(done: Result<T, Failure>) -> T {
    done.unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::read::GzEncoder::new(bytes, flate2::Compression::fast());
    let mut out = Vec::new();
    std::io::Read::read_to_end(&mut encoder, &mut out).unwrap();
    out
}

/// Three layers in three formats: a root, changes to it, and whiteouts of both.
fn layers() -> Vec<ImageLayer> {
    vec![
        ImageLayer(GZIP, gzip(&roots::small())),
        ImageLayer(
            ZSTD,
            zstd::encode_all(
                &roots::files(&[
                    ("srv/old", b"old"),
                    ("opt/deep/a", b"a"),
                    ("opt/deep/b", b"b"),
                    ("etc/word", b"one"),
                ])[..],
                3,
            )
            .unwrap(),
        ),
        ImageLayer(
            TAR,
            roots::files(&[
                ("srv/.wh.old", b""),
                ("srv/new", b"new"),
                ("opt/deep/.wh..wh..opq", b""),
                ("opt/deep/c", b"c"),
                ("etc/word", b"two"),
                ("bin/.wh.mv", b""),
            ]),
        ),
    ]
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn an_image_becomes_a_template_layer_by_layer(t: Bodies) {
    let registry = TestRegistry::open();
    let parts = image(
        &layers(),
        json!({ "Env": ["PATH=/bin", "COLOUR=green"], "User": "user", "WorkingDir": "/srv" }),
    );
    registry.push("some/thing", "v1", &parts);
    let reference = format!("{}/some/thing:v1", registry.host());
    let said = fine(import(&t, "thing", &Image::new(&reference)).await);
    assert!(said.iter().any(|line| line.contains(&digest(&parts.manifest))), "{said:?}");
    let view = t.make(Create { template: "thing".into(), ..t.passing() }).await;
    let look = "pwd; id -u; echo $COLOUR; cat /etc/word; cd /; echo srv/* opt/deep/*; ls /bin/mv 2>/dev/null || echo gone";
    assert_eq!(
        t.sh(view.id(), look).await.ok().replace('\n', " "),
        "/srv 1000 green twosrv/new opt/deep/c gone"
    );
    // The same image by digest: nothing is downloaded twice.
    let again = Image::new(format!("{}/some/thing@{}", registry.host(), digest(&parts.manifest)));
    let said = fine(import(&t, "again", &again).await);
    assert_eq!(said.iter().filter(|line| line.ends_with("here already")).count(), 3, "{said:?}");
    let pulled = t
        .fleet()
        .log()
        .events(0, None, usize::MAX)
        .unwrap()
        .into_iter()
        .filter(Event::is::<ImagePulled>)
        .count();
    assert_eq!(pulled, 2);
    for missing in ["some/thing:v2", "some/other"] {
        let failure =
            import(&t, "missing", &Image::new(format!("{}/{missing}", registry.host()))).await.unwrap_err();
        assert_eq!(failure.kind, Kind::NotFound, "{failure}");
    }
    assert!(t.fleet().templates().view("missing").is_err(), "a template without a build is left");
}

/// More layers than a microVM has devices: some images hold several layers, and a whiteout is still above the
/// files that it hides.
#[body_test(except(
    process = "its overlay needs no devices",
    user = "a root file system of its own needs subordinate ids"
))]
async fn forty_layers_are_one_root(t: Bodies) {
    let mut layers = vec![ImageLayer(TAR, roots::small())];
    for index in 1..40usize {
        let own = format!("srv/own/{index}");
        let word = index.to_string();
        let mut entries: Vec<(&str, &[u8])> = vec![(&own, word.as_bytes()), ("etc/word", word.as_bytes())];
        match index {
            10 => entries.extend([("opt/deep/a", &b"a"[..]), ("opt/gone", b"x"), ("srv/dir/old", b"x")]),
            // A whiteout next to the file that it hides, in the same image.
            11 => entries.push(("opt/.wh.gone", b"")),
            // A whiteout far above, in another image.
            30 => entries.extend([("srv/dir/.wh..wh..opq", &b""[..]), ("srv/dir/new", b"new")]),
            31 => entries.push(("opt/gone", b"back")),
            // A whiteout of the whole directory, and then a new one in its place.
            35 => entries.push(("opt/.wh.deep", b"")),
            36 => entries.push(("opt/deep/b", b"b")),
            _ => {}
        }
        layers.push(ImageLayer(TAR, roots::files(&entries)));
    }
    let registry = TestRegistry::open();
    registry.push("many", "v1", &image(&layers, json!({})));
    fine(import(&t, "many", &Image::new(format!("{}/many:v1", registry.host()))).await);
    let view = t.make(Create { template: "many".into(), ..t.kept() }).await;
    let look = "cat /etc/word; cd /; echo; set -- srv/own/*; echo $#; echo srv/dir/* opt/deep/*; cat opt/gone; echo; cat srv/own/1";
    let seen = t.sh(view.id(), look).await.ok().replace('\n', " ");
    assert_eq!(seen, "39 39 srv/dir/new opt/deep/b back 1");
    // The Body's own changes are above all layers.
    let change = "rm /srv/dir/new && echo mine > /opt/gone && ls /srv/dir; cat /opt/gone";
    let request = ExecRequest { user: Some("root".into()), ..ExecRequest::new(["sh", "-c", change]) };
    assert_eq!(t.exec(view.id(), request).await.ok(), "mine");
}

#[test]
fn as_an_account_with_subordinate_ids() {
    run_as_account("body::images::an_image_becomes_a_template_layer_by_layer::process");
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn the_platform_is_chosen_and_the_door_opened(t: Bodies) {
    let registry = TestRegistry::closed();
    let mine = image(&[ImageLayer(TAR, roots::small())], json!({}));
    let other = registry::image_for("s390x", &[ImageLayer(TAR, roots::files(&[("other", b"")]))], json!({}));
    registry.push("a", "mine", &mine);
    registry.push("a", "other", &other);
    let native =
        serde_json::from_slice::<serde_json::Value>(&mine.blobs[1].1).unwrap()["architecture"].clone();
    let entry = |parts: &ImageParts, architecture: serde_json::Value| json!({ "mediaType": MANIFEST, "digest": digest(&parts.manifest), "size": parts.manifest.len(), "platform": { "os": "linux", "architecture": architecture } });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry(&other, json!("s390x")), entry(&mine, native)] });
    registry.push("a", "all", &ImageParts { manifest: index.to_string().into_bytes(), blobs: Vec::new() });
    let asked = Image::new(format!("{}/a:all", registry.host()));
    assert_eq!(import(&t, "closed", &asked).await.unwrap_err().kind, Kind::Denied);
    let wrong = Some(RegistryCredentials { username: registry::USER.0.into(), password: "wrong".into() });
    assert_eq!(
        import(&t, "closed", &Image { credentials: wrong, ..asked.clone() }).await.unwrap_err().kind,
        Kind::Denied
    );
    let credentials =
        Some(RegistryCredentials { username: registry::USER.0.into(), password: registry::USER.1.into() });
    let asked = Image { credentials, ..asked };
    fine(import(&t, "native", &asked).await);
    let view = t.make(Create { template: "native".into(), ..t.passing() }).await;
    assert_eq!(t.sh(view.id(), "id -u; ls /other 2>/dev/null | cat").await.ok(), "0");
    fine(import(&t, "foreign", &Image { platform: "linux/s390x".parse().ok(), ..asked.clone() }).await);
    let none = import(&t, "none", &Image { platform: "linux/riscv64".parse().ok(), ..asked.clone() })
        .await
        .unwrap_err();
    assert!(none.kind == Kind::NotFound && none.hints[0].contains("linux/s390x"), "{none}");
    let single = Image { reference: format!("{}/a:other", registry.host()), ..asked };
    assert!(import(&t, "single", &single).await.unwrap_err().to_string().contains("is for linux/s390x"));
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_build_begins_with_an_image_and_finds_its_account_there(t: Bodies) {
    let registry = TestRegistry::open();
    // The id 1000 is taken, and there is no `user`.
    let accounts = roots::files(&[
        ("etc/passwd", b"root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"),
        ("etc/group", b"root:x:0:\nnode:x:1000:\n"),
    ]);
    registry.push(
        "node",
        "1",
        &image(
            &[ImageLayer(TAR, roots::small()), ImageLayer(TAR, accounts)],
            json!({ "Env": ["PATH=/own/bin:/bin"], "User": "node" }),
        ),
    );
    let build = async |name: &str| {
        let asked = t.fleet().builds().request(name, &[], None, None).unwrap();
        let job = t.fleet().builds().begin(&asked.template, &asked.id).unwrap();
        let image =
            Image { dress: ImageProfile::ForE2b, ..Image::new(format!("{}/node:1", registry.host())) };
        let step = BuildStep {
            act: Instruction::Run {
                command: "id -un; id -u; echo $PATH; pwd; echo done > made".into(),
                user: None,
            },
            force: false,
        };
        let built = t
            .fleet()
            .builds()
            .build(
                &job,
                BuildRequest {
                    from: BaseImage::Image(image),
                    steps: vec![step],
                    start: None,
                    force: false,
                    allow: Vec::new(),
                },
            )
            .await;
        let said: Vec<String> = job.log_lines(0, usize::MAX).1.into_iter().map(|said| said.message).collect();
        (built, said)
    };
    let (built, said) = build("app").await;
    fine(built);
    let at = said.iter().position(|line| line == "user").unwrap_or_else(|| panic!("{said:?}"));
    assert_eq!(said[at..at + 4], ["user", "1001", "/own/bin:/bin", "/home/user"]);
    let view = t.make(Create { template: "app".into(), ..t.passing() }).await;
    assert_eq!(t.sh(view.id(), "cat made; stat -c %U made .").await.ok(), "done\nuser\nuser");
    let (built, said) = build("again").await;
    fine(built);
    assert_eq!(said.iter().filter(|line| *line == "CACHED").count(), 2, "{said:?}");
}

/// A registry with one image that answers honestly except where `lie` answers.
fn liar(
    parts: &ImageParts,
    lie: impl Fn(&RecordedRequest, &ImageParts) -> Option<CannedResponse> + Send + Sync + 'static,
) -> ScriptedServer {
    let parts = parts.clone();
    ScriptedServer::start(move |asked| lie(asked, &parts).unwrap_or_else(|| truth(asked, &parts)))
}

fn truth(asked: &RecordedRequest, parts: &ImageParts) -> CannedResponse {
    let last = asked.path.rsplit('/').next().unwrap_or_default();
    match parts.blobs.iter().find(|(digest, _)| digest == last) {
        Some((_, bytes)) => CannedResponse::ok(bytes.clone()),
        None if asked.path.contains("/manifests/") => CannedResponse::ok(parts.manifest.clone()),
        None => CannedResponse::nothing(),
    }
}

fn of(liar: &ScriptedServer) -> Image {
    Image::new(format!("{}/x:y", liar.host()))
}

fn is_layer(asked: &RecordedRequest, parts: &ImageParts) -> bool {
    asked.path.ends_with(&parts.blobs[0].0)
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_registry_that_lies_gets_nothing_in(t: Bodies) {
    let honest = image(&[ImageLayer(TAR, roots::small())], json!({}));
    let control = liar(&honest, |_, _| None);
    fine(import(&t, "control", &of(&control)).await);
    t.fleet().templates().remove("control").unwrap();

    type Lie = fn(&RecordedRequest, &ImageParts) -> Option<CannedResponse>;
    let lies: Vec<(&str, Lie)> = vec![
        ("does not match", |asked, parts| {
            is_layer(asked, parts).then(|| CannedResponse::ok(vec![b'x'; parts.blobs[0].1.len()]))
        }),
        ("sends more than it may", |asked, parts| {
            is_layer(asked, parts)
                .then(|| CannedResponse { endless: true, ..CannedResponse::ok(vec![b'x'; 1 << 16]) })
        }),
        ("sends more than it may", |asked, _| {
            asked
                .path
                .contains("/manifests/")
                .then(|| CannedResponse { endless: true, ..CannedResponse::ok(vec![b' '; 1 << 16]) })
        }),
        ("does not match", |asked, parts| {
            asked.path.ends_with(&parts.blobs[1].0).then(|| CannedResponse::ok(b"{}".to_vec()))
        }),
        ("malformed", |asked, _| {
            asked.path.contains("/manifests/").then(|| CannedResponse::ok(b"<html>".to_vec()))
        }),
        ("redirects too often", |asked, parts| {
            is_layer(asked, parts).then(|| CannedResponse::elsewhere(&asked.path))
        }),
        ("redirects too often, or to an invalid address", |asked, parts| {
            is_layer(asked, parts).then(|| CannedResponse::elsewhere("file:///etc/passwd"))
        }),
        ("refuses the credentials", |asked, parts| {
            is_layer(asked, parts).then(|| CannedResponse {
                status: 401,
                headers: vec!["WWW-Authenticate: Basic realm=x".into()],
                ..CannedResponse::default()
            })
        }),
        ("answers 418: no", |asked, parts| {
            is_layer(asked, parts)
                .then(|| CannedResponse { status: 418, ..CannedResponse::ok(b"no".to_vec()) })
        }),
    ];
    for (expected, lie) in lies {
        let failure = import(&t, "lies", &of(&liar(&honest, lie))).await.unwrap_err();
        assert!(failure.to_string().contains(expected), "{expected}: {failure}");
    }
    // A manifest that is requested by digest is verified by it.
    let forged = liar(&honest, |_, _| None);
    let asked = Image::new(format!("{}/x@{}", forged.host(), digest(b"another")));
    assert!(import(&t, "lies", &asked).await.unwrap_err().to_string().contains("does not match"));
    // Layers with correct digests and hostile contents.
    let bomb = {
        let mut builder =
            tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best()));
        let mut header = tar::Header::new_gnu();
        header.set_size(320 << 20);
        builder
            .append_data(&mut header, "zeros", std::io::Read::take(std::io::repeat(0), 320 << 20))
            .unwrap();
        builder.into_inner().unwrap().finish().unwrap()
    };
    for (layer, expected) in [
        (ImageLayer(TAR, roots::climbing()), ".."),
        (ImageLayer(GZIP, bomb), "holds more than"),
        (ImageLayer(TAR, b"noise".repeat(1000)), "cannot be read"),
        (ImageLayer("text/plain", b"x".to_vec()), "unsupported media type"),
    ] {
        let parts = image(&[layer], json!({}));
        let failure = import(&t, "lies", &of(&liar(&parts, |_, _| None))).await.unwrap_err();
        let said = testkit::explain(&failure);
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // Nothing is left but downloads that may continue.
    assert!(t.fleet().templates().list().unwrap().is_empty());
    t.fleet().garbage().collect(GcMode::Remove).await.unwrap();
    for dir in ["layers", "images"] {
        let left: Vec<_> = std::fs::read_dir(t.fleet().data().join(dir))
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name())
            .filter(|name| name != "lock")
            .collect();
        assert!(left.is_empty(), "{dir}: {left:?}");
    }
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn what_broke_off_goes_on_and_secrets_stay_where_they_belong(t: Bodies) {
    let parts = image(&[ImageLayer(TAR, roots::small())], json!({}));
    // The other server, to which blobs are redirected: it breaks off once, in the middle.
    let broken = Mutex::new(false);
    let store = liar(&parts, move |asked, parts| {
        let whole = &parts.blobs[0].1;
        let half = whole.len() / 2;
        if !is_layer(asked, parts) {
            return None;
        }
        match asked
            .headers
            .get("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok())
        {
            Some(from) => Some(CannedResponse {
                status: 206,
                headers: vec![format!("Content-Range: bytes {from}-{}/{}", whole.len() - 1, whole.len())],
                body: whole[from..].to_vec(),
                ..CannedResponse::default()
            }),
            None if !std::mem::replace(&mut *broken.lock().unwrap(), true) => Some(CannedResponse {
                claims: Some(whole.len()),
                ..CannedResponse::ok(whole[..half].to_vec())
            }),
            None => None,
        }
    });
    let place = store.host().replace("127.0.0.1", "localhost");
    let tokens = ScriptedServer::start(|_| CannedResponse::ok(br#"{"token":"pass"}"#.to_vec()));
    let realm = tokens.host();
    let registry = liar(&parts, move |asked, _| {
        if asked.headers.get("authorization").map(String::as_str) != Some("Bearer pass") {
            return Some(CannedResponse {
                status: 401,
                headers: vec![format!(
                    "WWW-Authenticate: Bearer realm=\"http://{realm}/token\",service=\"s v\""
                )],
                ..CannedResponse::default()
            });
        }
        asked
            .path
            .contains("/blobs/")
            .then(|| CannedResponse::elsewhere(&format!("http://{place}{}", asked.path)))
    });
    let credentials = Some(RegistryCredentials { username: "me".into(), password: "hidden".into() });
    let said = fine(import(&t, "x", &Image { credentials, ..of(&registry) }).await);
    assert!(said.iter().any(|line| line.contains("going on from")), "{said:?}");
    assert!(store.asked().iter().any(|asked| asked.headers.contains_key("range")), "it began anew");
    assert!(
        store.asked().iter().all(|asked| !asked.headers.contains_key("authorization")),
        "{:?}",
        store.asked()
    );
    let asked = tokens.asked();
    assert_eq!(asked[0].path, "/token?service=s+v&scope=repository%3Ax%3Apull");
    assert_eq!(asked[0].headers["authorization"], "Basic bWU6aGlkZGVu");
    let log = t.fleet().log().events(0, None, usize::MAX).unwrap();
    assert!(!format!("{log:?}").contains("hidden"));
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn whoever_asks_from_outside_reaches_no_registry_inside(t: Bodies) {
    let registry = TestRegistry::open();
    registry.push("x", "y", &image(&[ImageLayer(TAR, roots::small())], json!({})));
    let asked = Image::new(format!("{}/x:y", registry.host()));
    let outside = RegistryAccess { inside: PrivateAddresses::Refused, ..RegistryAccess::default() };
    let failure = import(&t, "x", &Image { reach: outside.clone(), ..asked.clone() }).await.unwrap_err();
    assert!(failure.kind == Kind::Denied && failure.to_string().contains("private address"), "{failure}");
    fine(
        import(
            &t,
            "x",
            &Image { reach: RegistryAccess { trusted: vec![registry.host()], ..outside }, ..asked },
        )
        .await,
    );
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn whoever_a_redirect_leads_to_is_not_told_the_password(t: Bodies) {
    let parts = image(&[ImageLayer(TAR, roots::small())], json!({}));
    let tokens = ScriptedServer::start(|_| CannedResponse::ok(br#"{"token":"pass"}"#.to_vec()));
    let realm = tokens.host();
    // The redirect target requires a token of its own.
    let store = ScriptedServer::start(move |_| CannedResponse {
        status: 401,
        headers: vec![format!("WWW-Authenticate: Bearer realm=\"http://{realm}/token\"")],
        ..CannedResponse::default()
    });
    let place = store.host().replace("127.0.0.1", "localhost");
    let registry = liar(&parts, move |asked, _| {
        asked
            .path
            .contains("/blobs/")
            .then(|| CannedResponse::elsewhere(&format!("http://{place}{}", asked.path)))
    });
    let credentials = Some(RegistryCredentials { username: "me".into(), password: "hidden".into() });
    let refused = import(&t, "x", &Image { credentials, ..of(&registry) }).await;
    assert!(refused.is_err());
    assert!(!store.asked().is_empty(), "a control: the redirect was followed");
    assert!(tokens.asked().is_empty(), "{:?}", tokens.asked());
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_layer_may_come_twice(t: Bodies) {
    let nothing = || ImageLayer(TAR, roots::files(&[]));
    let word = ImageLayer(TAR, roots::files(&[("etc/word", b"one")]));
    let registry = TestRegistry::open();
    let parts = image(
        &[ImageLayer(TAR, roots::small()), nothing(), word, nothing()],
        json!({ "Env": ["PATH=/bin"] }),
    );
    registry.push("twice", "v1", &parts);
    fine(import(&t, "twice", &Image::new(format!("{}/twice:v1", registry.host()))).await);
    let view = t.make(Create { template: "twice".into(), ..t.passing() }).await;
    assert_eq!(t.sh(view.id(), "cat /etc/word").await.ok(), "one");
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_registry_that_stands_still_keeps_nobody_from_the_same_layer_of_another(t: Bodies) {
    let parts = image(&[ImageLayer(TAR, roots::small())], json!({}));
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Mutex::new(held);
    let slow = liar(&parts, move |asked, parts| {
        if is_layer(asked, parts) {
            let _ = held.lock().unwrap().recv();
        }
        None
    });
    // Released before the registry, also when this test fails.
    let release = release;
    let quick = liar(&parts, |_, _| None);
    let (from_slow, from_quick) = (of(&slow), of(&quick));
    let mut standing = std::pin::pin!(import(&t, "slow", &from_slow));
    let begun = async {
        while !slow.asked().iter().any(|asked| is_layer(asked, &parts)) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        ended = &mut standing => panic!("it did not stand still: {ended:?}"),
        () = begun => {}
    }
    let brought =
        tokio::time::timeout(std::time::Duration::from_secs(60), import(&t, "quick", &from_quick)).await;
    fine(brought.expect("the other registry is not waited for"));
    drop(release);
    fine(standing.await);
    for name in ["slow", "quick"] {
        t.fleet().templates().remove(name).unwrap();
    }
}
