//! Plain loops, compiled for several instruction sets.

/// Defines functions that the compiler vectorises for the instruction set detected at run time. A body is inlined into the
/// method of a `pulp::NullaryFnOnce`: a closure there would be compiled for the baseline CPU.
macro_rules! vectorised {
    (@) => { () };
    (@ $out:ty) => { $out };
    ($($(#[$meta:meta])* $vis:vis fn $name:ident<$a:lifetime $(, $t:ident: $bound:path)?>($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::needless_lifetimes)]
        $vis fn $name<$a $(, $t: $bound)?>($($arg: $type),*) $(-> $out)? {
            struct Call<$a $(, $t: $bound)?> {
                $($arg: $type),*
            }

            impl<$a $(, $t: $bound)?> pulp::NullaryFnOnce for Call<$a $(, $t)?> {
                type Output = vectorised!(@ $($out)?);

                #[inline(always)]
                fn call(self) -> Self::Output {
                    let Self { $($arg),* } = self;
                    $body
                }
            }

            pulp::Arch::new().dispatch(Call { $($arg),* })
        }
    )*};
}
