//! The proxy of the operator's network, as the settings name it.

use proto::{
    Failure, Kind,
    egress::{
        CorporateLogin, CorporateProxyOrder, EgressOrders, is_secret_host, read_no_proxy, read_proxy_url,
    },
};
use vault::SealKey;

use crate::{Fleet, settings::Setting};

/// The corporate proxy for the orders of an egress process; none where the settings name none. `kept` has the orders
/// that the process already has: a login that cannot be read now stays as it is.
pub(crate) fn corporate_proxy(
    fleet: &Fleet,
    kept: Option<&EgressOrders>,
    key: &SealKey,
) -> Result<Option<CorporateProxyOrder>, Failure> {
    let settings = fleet.settings().read()?;
    let Some(url) = settings.proxy else { return Ok(None) };
    let wrong = |setting: Setting, why: &str| {
        Failure::new(Kind::Usage, format!("the setting {} cannot be used", setting.name())).because(why)
    };
    let address = read_proxy_url(&url).map_err(|why| wrong(Setting::Proxy, why))?;
    let direct = read_no_proxy(settings.no_proxy.as_deref().unwrap_or_default());
    let direct = direct.map_err(|why| wrong(Setting::NoProxy, why))?;
    let login = settings.proxy_secret.map(|name| corporate_login(fleet, name, &address, key)).transpose();
    let kept = kept.and_then(|kept| kept.corporate_proxy.as_ref());
    let login = match (login, kept.filter(|kept| kept.address == address)) {
        (Err(_), Some(kept)) => kept.login.clone(),
        (login, _) => login?,
    };
    Ok(Some(CorporateProxyOrder { address, direct, login }))
}

/// The login of a secret, which must belong to the proxy.
fn corporate_login(
    fleet: &Fleet,
    name: String,
    address: &str,
    key: &SealKey,
) -> Result<CorporateLogin, Failure> {
    let secrets = fleet.secrets();
    let record = secrets.find(&name)?;
    let (host, port) = address.rsplit_once(':').unwrap_or_default();
    let belongs = |own: &String| port.parse().is_ok_and(|port| is_secret_host(own, host, port));
    if record.ssh.is_some() || !record.hosts.iter().any(belongs) {
        return Err(Failure::new(Kind::Usage, format!("the secret {name} does not belong to {address}"))
            .because("network.proxy_secret names it as the login of the corporate proxy")
            .hint(format!("printf USER:PASSWORD | pal secret set {name} --to {address}"))
            .hint("a secret belongs to names: where network.proxy has an address, give it a name"));
    }
    let sealed = secrets.sealed_value(&record, key)?;
    Ok(CorporateLogin { name, sealed })
}
