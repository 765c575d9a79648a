;; The matrix product of linear layers with SIMD: y = x w^T in float32.
;;
;; x is [rows, inner], w is [outer, inner] and y is [rows, outer], all row-major. `inner` is a multiple of 4 and
;; `outer` a multiple of 2; the caller pads with zeros. Two rows of w are multiplied with four rows of x at a time, so
;; that each value that is loaded is used several times.
;;
;; make_wasm.py compiles this file into matmul_wasm.js.
(module
  (memory (export "memory") 1)

  ;; The sums of the four lanes of a and of b, in lanes 0 and 1.
  (func $sums (param $a v128) (param $b v128) (result v128)
    (local $halves v128)
    (local.set $halves (f32x4.add
      (i8x16.shuffle 0 1 2 3 4 5 6 7 16 17 18 19 20 21 22 23 (local.get $a) (local.get $b))
      (i8x16.shuffle 8 9 10 11 12 13 14 15 24 25 26 27 28 29 30 31 (local.get $a) (local.get $b))))
    (f32x4.add
      (i8x16.shuffle 0 1 2 3 8 9 10 11 0 1 2 3 8 9 10 11 (local.get $halves) (local.get $halves))
      (i8x16.shuffle 4 5 6 7 12 13 14 15 4 5 6 7 12 13 14 15 (local.get $halves) (local.get $halves))))

  (func (export "matmul")
    (param $x i32) (param $w i32) (param $y i32) ;; addresses in bytes
    (param $rows i32) (param $inner i32) (param $outer i32)
    (local $width i32) (local $stride i32) ;; bytes in a row of x and w, and of y
    (local $output i32) (local $left i32) (local $from i32) (local $to i32) (local $i i32)
    (local $x1 i32) (local $x2 i32) (local $x3 i32) (local $w1 i32)
    (local $v v128) (local $w0v v128) (local $w1v v128)
    (local $a0 v128) (local $a1 v128) (local $a2 v128) (local $a3 v128)
    (local $b0 v128) (local $b1 v128) (local $b2 v128) (local $b3 v128)
    (local.set $width (i32.shl (local.get $inner) (i32.const 2)))
    (local.set $stride (i32.shl (local.get $outer) (i32.const 2)))
    (local.set $output (i32.const 0))
    (block $done
      (loop $outputs
        (br_if $done (i32.ge_u (local.get $output) (local.get $outer)))
        (local.set $w1 (i32.add (local.get $w) (local.get $width)))
        (local.set $left (local.get $rows))
        (local.set $from (local.get $x))
        (local.set $to (i32.add (local.get $y) (i32.shl (local.get $output) (i32.const 2))))

        ;; four rows of x
        (block $fours_done
          (loop $fours
            (br_if $fours_done (i32.lt_u (local.get $left) (i32.const 4)))
            (local.set $x1 (i32.add (local.get $from) (local.get $width)))
            (local.set $x2 (i32.add (local.get $x1) (local.get $width)))
            (local.set $x3 (i32.add (local.get $x2) (local.get $width)))
            (local.set $a0 (v128.const f32x4 0 0 0 0)) (local.set $b0 (v128.const f32x4 0 0 0 0))
            (local.set $a1 (v128.const f32x4 0 0 0 0)) (local.set $b1 (v128.const f32x4 0 0 0 0))
            (local.set $a2 (v128.const f32x4 0 0 0 0)) (local.set $b2 (v128.const f32x4 0 0 0 0))
            (local.set $a3 (v128.const f32x4 0 0 0 0)) (local.set $b3 (v128.const f32x4 0 0 0 0))
            (local.set $i (i32.const 0))
            (loop $features
              (local.set $w0v (v128.load (i32.add (local.get $w) (local.get $i))))
              (local.set $w1v (v128.load (i32.add (local.get $w1) (local.get $i))))
              (local.set $v (v128.load (i32.add (local.get $from) (local.get $i))))
              (local.set $a0 (f32x4.add (local.get $a0) (f32x4.mul (local.get $v) (local.get $w0v))))
              (local.set $b0 (f32x4.add (local.get $b0) (f32x4.mul (local.get $v) (local.get $w1v))))
              (local.set $v (v128.load (i32.add (local.get $x1) (local.get $i))))
              (local.set $a1 (f32x4.add (local.get $a1) (f32x4.mul (local.get $v) (local.get $w0v))))
              (local.set $b1 (f32x4.add (local.get $b1) (f32x4.mul (local.get $v) (local.get $w1v))))
              (local.set $v (v128.load (i32.add (local.get $x2) (local.get $i))))
              (local.set $a2 (f32x4.add (local.get $a2) (f32x4.mul (local.get $v) (local.get $w0v))))
              (local.set $b2 (f32x4.add (local.get $b2) (f32x4.mul (local.get $v) (local.get $w1v))))
              (local.set $v (v128.load (i32.add (local.get $x3) (local.get $i))))
              (local.set $a3 (f32x4.add (local.get $a3) (f32x4.mul (local.get $v) (local.get $w0v))))
              (local.set $b3 (f32x4.add (local.get $b3) (f32x4.mul (local.get $v) (local.get $w1v))))
              (br_if $features (i32.lt_u
                (local.tee $i (i32.add (local.get $i) (i32.const 16))) (local.get $width))))
            (v128.store64_lane 0 (local.get $to) (call $sums (local.get $a0) (local.get $b0)))
            (local.set $to (i32.add (local.get $to) (local.get $stride)))
            (v128.store64_lane 0 (local.get $to) (call $sums (local.get $a1) (local.get $b1)))
            (local.set $to (i32.add (local.get $to) (local.get $stride)))
            (v128.store64_lane 0 (local.get $to) (call $sums (local.get $a2) (local.get $b2)))
            (local.set $to (i32.add (local.get $to) (local.get $stride)))
            (v128.store64_lane 0 (local.get $to) (call $sums (local.get $a3) (local.get $b3)))
            (local.set $to (i32.add (local.get $to) (local.get $stride)))
            (local.set $from (i32.add (local.get $x3) (local.get $width)))
            (local.set $left (i32.sub (local.get $left) (i32.const 4)))
            (br $fours)))

        ;; the rows that are left
        (block $ones_done
          (loop $ones
            (br_if $ones_done (i32.eqz (local.get $left)))
            (local.set $a0 (v128.const f32x4 0 0 0 0)) (local.set $b0 (v128.const f32x4 0 0 0 0))
            (local.set $i (i32.const 0))
            (loop $features
              (local.set $v (v128.load (i32.add (local.get $from) (local.get $i))))
              (local.set $a0 (f32x4.add (local.get $a0)
                (f32x4.mul (local.get $v) (v128.load (i32.add (local.get $w) (local.get $i))))))
              (local.set $b0 (f32x4.add (local.get $b0)
                (f32x4.mul (local.get $v) (v128.load (i32.add (local.get $w1) (local.get $i))))))
              (br_if $features (i32.lt_u
                (local.tee $i (i32.add (local.get $i) (i32.const 16))) (local.get $width))))
            (v128.store64_lane 0 (local.get $to) (call $sums (local.get $a0) (local.get $b0)))
            (local.set $to (i32.add (local.get $to) (local.get $stride)))
            (local.set $from (i32.add (local.get $from) (local.get $width)))
            (local.set $left (i32.sub (local.get $left) (i32.const 1)))
            (br $ones)))

        (local.set $w (i32.add (local.get $w1) (local.get $width)))
        (local.set $output (i32.add (local.get $output) (i32.const 2)))
        (br $outputs)))))
