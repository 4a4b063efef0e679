//! Plain loops, compiled for several instruction sets.

/// Functions whose bodies the compiler vectorises for the instruction set that the processor is found to have. They are that of
/// a `pulp::NullaryFnOnce`, inlined: a closure in its place would be compiled for the baseline.
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
