//! Templates whose base is an image from a registry.

use proto::{
    Failure, Kind,
    template::{TemplateBuild, TemplateSettings},
};

use super::{
    BuildJob, ProgressFn,
    build::{BuildStage, digest},
    jobs,
};
use crate::{
    Builds,
    images::{Image, ImageProfile, PulledImage},
};

impl Builds<'_> {
    /// Imports an image unchanged as a template; the settings in `with` override those of the image.
    pub async fn import_image(
        &self,
        name: &str,
        image: &Image,
        with: TemplateSettings,
        say: ProgressFn<'_>,
    ) -> Result<TemplateBuild, Failure> {
        super::check_name(name)?;
        let _building = self.fleet.garbage().building()?;
        let PulledImage { layers, settings, digest } = self.fleet.image_puller().pull(image, say).await?;
        let settings = TemplateSettings { user: with.user.or(settings.user), sudo: with.sudo, ..settings };
        let template = self.fleet.templates().find_or_create(name)?.id;
        self.finish_build(template, layers, settings, &format!("the image {}, {digest}", image.reference))
    }

    /// The initial state of a build whose base is an image.
    pub(super) async fn begin_image(&self, job: &BuildJob, image: &Image) -> Result<BuildStage, Failure> {
        let mut say = |said: &str| job.say(said);
        let puller = self.fleet.image_puller();
        let pulled = tokio::select! {
            pulled = puller.pull(image, &mut say) => pulled?,
            () = job.wait_cancelled() => return Err(jobs::cancelled_failure()),
        };
        let chain = digest(&[&serde_json::to_string(&pulled.layers).unwrap_or_default()]);
        let mut stand = BuildStage { layers: pulled.layers, settings: pulled.settings, chain };
        if image.dress == ImageProfile::ForE2b {
            let path = stand.settings.env.get("PATH").cloned().unwrap_or_default();
            stand.chain = digest(&[&stand.chain, ACCOUNT, &path]);
            self.layer(job, &mut stand, &[], async |body, _| {
                self.run_script(job, body, ACCOUNT, &[&path], "/").await
            })
            .await
            .map_err(|failure| {
                Failure::new(Kind::Usage, "cannot create the account `user` in the image")
                    .because(failure)
                    .hint("E2B's builds need a shell, mkdir, chmod and chown in the image")
            })?;
        }
        Ok(stand)
    }
}

/// Creates an account `user`, which E2B's clients expect, and makes login shells keep the image's own PATH, the
/// argument.
const ACCOUNT: &str = r#"
set -e
has() { while IFS=: read -r name _ number _; do [ "$name" != "$2" ] && [ "$number" != "$2" ] || return 0; done < "$1"; return 1; }
[ -f /etc/passwd ] || : > /etc/passwd
[ -f /etc/group ] || : > /etc/group
if ! has /etc/passwd user; then
  id=1000
  while has /etc/passwd $id || has /etc/group $id; do id=$((id + 1)); done
  shell=/bin/sh
  [ ! -x /bin/bash ] || shell=/bin/bash
  echo "user:x:$id:$id::/home/user:$shell" >> /etc/passwd
  has /etc/group user || echo "user:x:$id:" >> /etc/group
fi
while IFS=: read -r name _ number group _; do [ "$name" != user ] || owner=$number:$group; done < /etc/passwd
mkdir -p /home/user
chown "$owner" /home/user
chmod 755 /home/user
if [ -d /etc/sudoers.d ]; then
  echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/user
  echo 'Defaults env_keep += "http_proxy https_proxy HTTP_PROXY HTTPS_PROXY no_proxy NO_PROXY SSL_CERT_FILE CURL_CA_BUNDLE GIT_SSL_CAINFO NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE PIP_CERT"' >> /etc/sudoers.d/user
  chmod 0440 /etc/sudoers.d/user
fi
case $1 in
  ''|*\'*) ;;
  *) mkdir -p /etc/profile.d; echo "export PATH='$1'" > /etc/profile.d/00-image.sh;;
esac
"#;
