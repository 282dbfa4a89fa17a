"""Prototype (b): the forward recorded once as calls, replayed by an interpreter; one variant per shape."""
import sys, time, warnings
import torch, functools
from torch import nn
from torch.overrides import TorchFunctionMode
warnings.simplefilter("ignore")
sys.path.insert(0,"scratch")
from zoo import ZOO
torch.set_num_threads(1)
class Ref:
    __slots__=("i",)
    def __init__(s,i): s.i=i
class Par:
    __slots__=("m","k")
    def __init__(s,m,k): s.m=m; s.k=k
def tmap(f,o):
    if isinstance(o,torch.Tensor): return f(o)
    if isinstance(o,(list,tuple)):
        r=[tmap(f,x) for x in o]; return type(o)(*r) if hasattr(o,"_fields") else type(o)(r)
    if isinstance(o,dict): return {k:tmap(f,v) for k,v in o.items()}
    return o
def rmap(env,o):
    if type(o) is Ref: return env[o.i]
    if type(o) is Par: return o.m._parameters.get(o.k) if o.k in o.m._parameters else o.m._buffers[o.k]
    if type(o) in (list,tuple): return type(o)(rmap(env,x) for x in o)
    if type(o) is dict: return {k:rmap(env,v) for k,v in o.items()}
    return o
class Rec(TorchFunctionMode):
    def __init__(self, model, inputs):
        self.calls=[]; self.ids={}; self.keep=[]; self.n=0; self.answers=0
        self.params={}
        for m in model.modules():
            for k,p in [*m._parameters.items(),*m._buffers.items()]:
                if p is not None: self.params.setdefault(id(p),Par(m,k))
        for t in inputs.values(): self.new(t)
    def new(self,t):
        self.ids[id(t)]=self.n; self.keep.append(t); self.n+=1; return self.n-1
    def ref(self,t):
        if id(t) in self.ids: return Ref(self.ids[id(t)])
        if id(t) in self.params: return self.params[id(t)]
        return t  # a constant
    def __torch_function__(self,f,types,args=(),kwargs=None):
        kwargs=kwargs or {}
        a,k=tmap(self.ref,args),tmap(self.ref,kwargs)
        out=f(*args,**kwargs)
        outs=[]; tmap(lambda t: outs.append(t) or t,(out,))
        if outs:
            idx=[self.ids.get(id(t)) if id(t) in self.ids else self.new(t) for t in outs]
            self.calls.append((f,a,k,idx,isinstance(out,torch.Tensor)))
        elif args and isinstance(args[0],torch.Tensor) and getattr(f,"__name__","") in("__bool__","item","tolist","__int__","__index__"): self.answers+=1
        elif getattr(f,"__name__","")in("__setitem__",): self.calls.append((f,a,k,[],False))
        return out
def record(model, call, inputs, result):
    r=Rec(model,inputs)
    with r: out=call(inputs)
    return r, r.ids[id(result(out))]
def replay(r, inputs, last):
    env=dict(enumerate(inputs.values()))
    for f,a,k,idx,single in r.calls:
        out=f(*rmap(env,a),**rmap(env,k))
        if not idx: continue
        if single: env[idx[0]]=out
        else:
            outs=[]; tmap(lambda t: outs.append(t) or t,(out,))
            env.update(zip(idx,outs))
    return env[last]
def grads(loss,model):
    ps=[p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss,ps,allow_unused=True)
def timed(f,n=10):
    f(); t=[]
    for _ in range(n):
        s=time.perf_counter(); f(); t.append(time.perf_counter()-s)
    return sorted(t)[n//2]
if __name__=="__main__":
  for name in sys.argv[1:]:
    torch.manual_seed(0); build,make=ZOO[name]; model=build().train()
    made=make()
    if isinstance(made,dict): ins=made; call=lambda t: model(**t); res=lambda o:o.loss
    else:
        ins={str(i):v for i,v in enumerate(made[0])}; call=lambda t: model(*t.values()); res=lambda o:o
    try:
        s=time.perf_counter(); r,last=record(model,call,ins,res); first=time.perf_counter()-s
        t0=time.perf_counter(); r,last=record(model,call,ins,res); rec=time.perf_counter()-t0
        st={k:v.clone() for k,v in model.state_dict().items()}
        torch.manual_seed(1); bare=res(call(ins)); gb=grads(bare.float().mean() if bare.dim() else bare,model)
        model.load_state_dict(st)
        torch.manual_seed(1); got=replay(r,ins,last); gg=grads(got.float().mean() if got.dim() else got,model)
        eq=torch.equal(bare,got); ge=sum((a is b) or torch.equal(a,b) for a,b in zip(gb,gg))
        tb=timed(lambda: call(ins)); tr=timed(lambda: replay(r,ins,last))
        line=f"{name}: {len(r.calls)} calls, python answers baked in {r.answers}, recorded in {rec*1e3:.1f} ms; bare {tb*1e3:.2f} replay {tr*1e3:.2f} ms; loss equal {eq}, grads {ge}/{len(gb)}"
        # another shape
        if isinstance(made,dict):
            other=make(17)
            try:
                torch.manual_seed(1); b=res(call(other)); torch.manual_seed(1); g=replay(r,other,last)
                line+=f"; other length: {'equal' if torch.equal(b,g) else f'WRONG silently {float(b):.4f} {float(g):.4f}'}"
            except Exception as e: line+=f"; other length: {type(e).__name__} {str(e)[:60]}"
        print(line)
    except Exception as e:
        import traceback; traceback.print_exc(limit=-3); print(name,"FAILED",type(e).__name__,str(e)[:200])
