//! `#[body_test]`: turns one test into a test for each layer and each kind of user.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::{Ident, ItemFn, LitStr, Token, parenthesized, parse::Parse, parse::ParseStream, parse_macro_input};

/// Every layer of the design, and whether this version supports it.
const LAYERS: [(&str, bool); 4] =
    [("process", true), ("container", false), ("microvm", true), ("wasm", false)];
/// The users that create Bodies. A test can exclude either, with a reason.
const CALLERS: [&str; 2] = ["root", "user"];

/// Runs an `async fn name(t: Bodies)` once for each layer, as the user of the suite and again as an ordinary
/// user.
///
/// `#[body_test(except(wasm = "no sockets in this world", user = "cgroups are not delegated"))]` excludes
/// some.
#[proc_macro_attribute]
pub fn body_test(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let Exceptions(exceptions) = parse_macro_input!(attribute as Exceptions);
    let mut function = parse_macro_input!(item as ItemFn);
    let (name, attributes) = (function.sig.ident.clone(), std::mem::take(&mut function.attrs));
    function.sig.ident = format_ident!("test");
    let except = |what: &str| exceptions.iter().find(|(name, _)| name == what).map(|(_, why)| why.clone());
    let (no_root, no_user) = (reason(except("root")), reason(except("user")));
    let layers = LAYERS.iter().filter(|(layer, runs)| *runs && except(layer).is_none());
    let tests = layers.map(|(layer, _)| {
        let (direct, as_user) = (format_ident!("{layer}"), format_ident!("{layer}_as_user"));
        // A microVM does not depend on the user of its hypervisor, and is slow; a separate test covers an
        // ordinary user.
        let user = (no_user.is_none() && *layer != "microvm").then(|| {
            quote! {
                #[test]
                fn #as_user() {
                    ::testkit::run_as_user(concat!(module_path!(), "::", #layer));
                }
            }
        });
        let (no_root, no_user) = (option(&no_root), option(&no_user));
        quote! {
            #[test]
            fn #direct() {
                let callers = ::testkit::CallerSkips { no_root: #no_root, no_user: #no_user };
                ::testkit::run(#layer, callers, test);
            }
            #user
        }
    });
    quote! {
        #(#attributes)*
        mod #name {
            #[allow(unused_imports)]
            use super::*;
            #function
            #(#tests)*
        }
    }
    .into()
}

fn reason(why: Option<LitStr>) -> Option<String> {
    why.map(|why| why.value())
}

fn option(why: &Option<String>) -> impl quote::ToTokens + use<> {
    match why {
        Some(why) => quote!(Some(#why)),
        None => quote!(None),
    }
}

struct Exceptions(Vec<(String, LitStr)>);

impl Parse for Exceptions {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let word: Ident = input.parse()?;
        if word != "except" {
            return Err(syn::Error::new(word.span(), "expected `except(LAYER = \"reason\")`"));
        }
        let list;
        parenthesized!(list in input);
        let pairs = list.parse_terminated(exception, Token![,])?;
        Ok(Self(pairs.into_iter().collect()))
    }
}

fn exception(input: ParseStream<'_>) -> syn::Result<(String, LitStr)> {
    let name: Ident = input.parse()?;
    input.parse::<Token![=]>()?;
    let why: LitStr = input.parse()?;
    let known = LAYERS.iter().map(|(layer, _)| *layer).chain(CALLERS).any(|known| name == known);
    if !known {
        return Err(syn::Error::new(name.span(), "neither a layer nor a caller"));
    }
    if why.value().len() < 8 {
        return Err(syn::Error::new(why.span(), "an exception needs a reason"));
    }
    Ok((name.to_string(), why))
}
